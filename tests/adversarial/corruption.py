"""Every flipped bit, every cut and every added byte is found, and no damaged tensor is ever returned.

    python -m tests.adversarial.corruption [flips|cuts] [--cases N] [--first N] [--every N] [--seed S] [--jobs 2]

Cases are single flipped bits, spread evenly over the kinds of bytes in a store. Also, each small file of a smaller
store is cut at every length, and gets bytes more.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import random
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from click.testing import CliRunner
from numpy.typing import NDArray

from scarctl.cli.main import cli
from scarctl.errors import ScarError
from scarctl.recovery.execute import execute
from scarctl.recovery.plan import Plan, plan_partial, plan_rollback
from scarctl.state.encoding import stored_as
from scarctl.store import Store, read_snapshot, verify
from tests.adversarial.image import LAYOUT, Image, make
from tests.store.helpers import read_all

LENGTHS = 40
"""Number of lengths to which segments are cut; other files are cut to every length."""
CLI_SHARE = 100
"""One in so many cases also goes through the command line, on real files."""
_TURN = 50
"""So many cases in a row are of one kind of store."""
ADDED = (b"\0", b" ", b"\n", b"}", b"\0" * 8, b"\xff" * 64)


@dataclass(frozen=True)
class Region:
    """Bytes of one kind in one file."""

    kind: str
    file: str
    start: int
    stop: int


@dataclass(frozen=True)
class Case:
    """One change of one file."""

    kind: str
    file: str
    what: str
    data: bytes
    partition: str | None = None
    """The partition whose copy is damaged, if data are damaged."""


@dataclass
class Outcome:
    done: Counter[str] = field(default_factory=Counter)
    results: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        self.done += other.done
        self.results += other.results
        self.violations += other.violations


def regions(image: Image) -> list[Region]:
    """Return all bytes of the store, by kind."""
    found = []
    for name, data in image.files.items():
        part = name.split("/")
        if len(part) == 4 and part[2] == "seg":
            found += [Region(kind, name, a, b) for kind, a, b, _ in _tensors(data) if a < b]
        else:
            kind = "settings" if len(part) == 1 else part[0] if len(part) == 2 else part[2]
            found.append(Region(kind.removesuffix("s").replace("log", "record"), name, 0, len(data)))
    return found


def _tensors(data: bytes) -> Iterator[tuple[str, int, int, str]]:
    """Yield `(kind, start, stop, tensor)` of a segment, parsed without scarctl."""
    head = 8 + int.from_bytes(data[:8], "little")
    yield "segment header", 0, head, ""
    for name, entry in json.loads(data[8:head]).items():
        if name != "__metadata__":
            start, stop = (head + at for at in entry["data_offsets"])
            kind = "data"
            if name.startswith("scarctl/"):
                kind = "extras" if name[8] == "e" else "table" if name[8] in "rudt" else "tail"
                kind = "pad" if name.startswith("scarctl/pad") else kind
            yield f"segment {kind}", start, stop, name


def partition_at(data: bytes, at: int) -> str:
    """Return the name of the partition to whose copy byte `at` of a segment belongs, without scarctl's reader."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    stored = stored_as(LAYOUT, header["__metadata__"].get("encoding", "exact"))
    (ids_at,) = [(a, b) for _, a, b, name in _tensors(data) if name == "scarctl/partitions"]
    ids = np.frombuffer(data[slice(*ids_at)], "<i8")
    ((start, tensor),) = [(a, name) for _, a, b, name in _tensors(data) if a <= at < b]
    ((g, t),) = [
        (g, t)
        for g, group in enumerate(stored.groups)
        for t in range(len(group.tensors))
        if group.key(t) == tensor
    ]
    mine = ids[(ids >= LAYOUT.base[g]) & (ids < LAYOUT.base[g + 1])]
    starts, stops = LAYOUT.row_ranges(mine)
    ends = np.cumsum(stops - starts) * stored.groups[g].tensors[t].row_bytes
    return LAYOUT.name(int(mine[np.searchsorted(ends, at - start, side="right")]))


def flips(image: Image, numbers: Sequence[int], seed: int) -> Iterator[Case]:
    """Yield flipped bits, of all kinds in turn. Case `n` is the same in every call."""
    by_kind: dict[str, list[Region]] = {}
    for region in regions(image):
        by_kind.setdefault(region.kind, []).append(region)
    kinds = sorted(by_kind)
    for number in numbers:
        rng = random.Random(f"{seed}/{number}")
        region = rng.choice(by_kind[kinds[number % len(kinds)]])
        at, bit = rng.randrange(region.start, region.stop), rng.randrange(8)
        data = image.files[region.file]
        changed = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
        partition = partition_at(data, at) if region.kind == "segment data" else None
        yield Case(
            region.kind, region.file, f"case {number}: bit {bit} of byte {at} flipped", changed, partition
        )


def cuts(image: Image) -> Iterator[Case]:
    """Yield small files cut to every length, and files with additional bytes, which are damage in a segment too."""
    for name, data in image.files.items():
        kind = name.split("/")[2] if name.startswith("lanes") else name.split("/")[0]
        step = max(1, len(data) // LENGTHS) if kind == "seg" else 1
        for length in (*range(0, len(data) - 1, step), len(data) - 1):
            yield Case(f"cut {kind}", name, f"cut to {length} bytes", data[:length])
        for more in ADDED:
            yield Case(f"longer {kind}", name, f"{len(more)} bytes {more[:1]!r} added", data + more)


class Kept:
    """A sink that keeps what a recovery restores in memory."""

    arena = None

    def __init__(self) -> None:
        self.found: dict[int, tuple[int, bytes]] = {}

    def room(self, group: int, ids: NDArray[np.int64]) -> None: ...

    def put(
        self,
        group: int,
        ids: NDArray[np.int64],
        versions: NDArray[np.int64],
        tensors: Sequence[NDArray[np.uint8]],
    ) -> None:
        starts, stops = LAYOUT.row_ranges(ids)
        at = 0
        for i, rows, version in zip(ids.tolist(), (stops - starts).tolist(), versions.tolist(), strict=True):
            self.found[i] = version, b"".join(t[at : at + rows].tobytes() for t in tensors)
            at += rows


class Attack:
    """Runs cases on one store."""

    def __init__(self, image: Image) -> None:
        self.image = image
        self.shard_of = np.zeros(LAYOUT.partitions, np.int32)

    def play(self, case: Case, *, by_command: bool) -> Outcome:
        outcome = Outcome()
        outcome.done[case.kind] += 1

        def failed(reason: str) -> None:
            outcome.violations.append(f"{case.file}: {case.what}: {reason}")

        try:
            self._found(case, failed)
            outcome.results[self._read(case, failed)] += 1
            outcome.results["recover: " + self._recover(case, failed)] += 1
            names = [None, *self.image.named]
            self._roll_back(case, names[zlib.crc32(case.what.encode()) % len(names)], failed)
            if by_command:
                outcome.results["through the command line"] += 1
                self._command(case, failed)
        except Exception as error:
            failed(f"{type(error).__name__}: {error}")
        return outcome

    def _found(self, case: Case, failed) -> None:  # type: ignore[no-untyped-def]
        """Check that `verify` finds the damage, and names the partition."""
        store = self.image.open()
        store.blobs.content[case.file] = case.data  # type: ignore[attr-defined]
        problems = verify(store, read_data=True).problems
        where = store.blobs.where(case.file)
        mine = [p for p in problems if p.file == where]
        if not mine:
            failed(f"not found by verify, which names {[p.file for p in problems]}")
        if case.partition is not None and [p.partition for p in mine] != [case.partition]:
            failed(f"verify names {[p.partition for p in mine]}, not {case.partition}")
        if case.file == "scarctl.json":
            try:
                self.image.open({case.file: case.data})
            except ScarError:
                return
            failed("the store is opened all the same")

    def _shards(self, case: Case) -> list[int]:
        part = case.file.split("/")
        return [int(part[1])] if part[0] == "lanes" else [0]

    def _right(self, i: int, version: int, data: bytes) -> bool:
        return self.image.copies.get(version, {}).get(i) == data

    def _read(self, case: Case, failed) -> str:  # type: ignore[no-untyped-def]
        """Check that reading gives the right bytes, an error, or a report of older bytes."""
        result = "read: as if nothing were"
        try:
            store = self.image.open({case.file: case.data})
            for shard in self._shards(case):
                state = store.state(shard, around=True)
                found, bad = read_all(store, state)
                if any(damage.error for damage in state.damaged):
                    result = "read: around a damaged record"
                elif bad or state.damaged:
                    result = "read: damaged copies left out"
                versions = dict(zip(state.ids.tolist(), state.version.tolist(), strict=True))
                doubt = dict(zip(state.ids.tolist(), state.doubt.tolist(), strict=True))
                for i in range(LAYOUT.partitions):
                    if i not in found and i not in bad:
                        failed(f"partition {i} is neither read nor reported")
                    if i in found and not self._right(i, versions[i], found[i]):
                        failed(f"wrong bytes of partition {i}, version {versions[i]}")
                    if i in found and versions[i] != self.image.newest[i] and not doubt[i]:
                        failed(f"an older copy of partition {i} passes for the newest")
                extras = store.read_extras(state)
                if extras is not None and self.image.extras.get(extras[0]) != extras[1]:
                    failed(f"wrong extras: {extras}")
        except ScarError:
            return "read: refused"
        return result

    def _recover(self, case: Case, failed) -> str:  # type: ignore[no-untyped-def]
        """Recover partially the partitions of the file."""
        try:
            store = self.image.open({case.file: case.data})
            ids = np.arange(LAYOUT.partitions)
            plan = plan_partial(ids, LAYOUT, self.shard_of, store.state(0, LAYOUT, around=True))
            done, kept = self._execute(plan, store)
        except ScarError as error:
            return error.kind
        if sorted(kept.found) != ids.tolist():
            failed("recovery left something out")
        for i, (version, data) in kept.found.items():
            if not self._right(i, version, data):
                failed(f"recovery gives wrong bytes of partition {i}, version {version}")
            if version != self.image.newest[i] and not done.degraded:
                failed(f"recovery gives an older copy of partition {i} and does not say so")
        return "degraded" if done.degraded else "whole"

    def _roll_back(self, case: Case, name: str | None, failed) -> None:  # type: ignore[no-untyped-def]
        """Check that a rollback gives one sealed whole state, or an error."""
        try:
            store = self.image.open({case.file: case.data})
            snapshot = None if name is None else read_snapshot(store, name)
            plan = plan_rollback(store, LAYOUT, self.shard_of, snapshot=snapshot)
            done, kept = self._execute(plan, store)
        except ScarError:
            return
        versions = {version for version, _ in kept.found.values()}
        wanted = self.image.sealed[-1] if name is None else self.image.named[name]
        if len(versions) != 1 or sorted(kept.found) != list(range(LAYOUT.partitions)):
            failed(f"a rollback to {name or 'the newest'} mixes versions {versions}, or is not whole")
        for i, (version, data) in kept.found.items():
            if not self._right(i, version, data):
                failed(f"a rollback to {name or 'the newest'} gives wrong bytes of partition {i}")
        if versions != {wanted} and not done.degraded:
            failed(
                f"a rollback to {name or 'the newest'} gives {versions}, not {wanted}, and does not say so"
            )

    def _execute(self, plan: Plan, store: Store) -> tuple[Plan, Kept]:
        kept = Kept()
        return execute(plan, store, None, kept).plan, kept

    def _command(self, case: Case, failed) -> None:  # type: ignore[no-untyped-def]
        """Run `scarctl verify` on real files."""
        with tempfile.TemporaryDirectory(prefix="scarctl-corruption-") as folder:
            self.image.write(Path(folder))
            (Path(folder) / case.file).write_bytes(case.data)
            done = CliRunner().invoke(cli, ["verify", "--json", "--store", folder])
            if done.exit_code != 13:
                failed(f"`scarctl verify` ends with {done.exit_code}")
            document = json.loads(done.stdout)
            if "error" in document:
                named = [document["error"]["message"]]
            else:
                named = [p["file"] for p in document["problems"]]
                partitions = [p["partition"] for p in document["problems"]]
                if case.partition is not None and partitions != [case.partition]:
                    failed(f"`scarctl verify` names {partitions}, not {case.partition}")
            if not any(case.file in text for text in named):
                failed(f"`scarctl verify` names {named}")


def attacks(seed: int, **options: int) -> list[Attack]:
    """Return the attack on two kinds of stores: with exact copies only, and with encoded ones."""
    return [
        Attack(make(seed, **options)),  # type: ignore[arg-type]
        Attack(make(seed, encoding="int8", **options)),  # type: ignore[arg-type]
    ]


def run(job: int, jobs: int, numbers: slice, seed: int, what: str) -> Outcome:
    """Run every `jobs`-th case."""
    logging.disable()
    outcome = Outcome()
    step = numbers.step * jobs
    mine = slice(numbers.start + job * numbers.step, numbers.stop, step)
    for n, attack in enumerate(attacks(seed) if what in ("flips", "all") else ()):
        chosen = [number for number in range(mine.start, mine.stop, step) if number // _TURN % 2 == n]
        for k, case in enumerate(flips(attack.image, chosen, seed)):
            outcome.add(attack.play(case, by_command=k % CLI_SHARE == 0))
    for attack in attacks(seed, shards=2, rounds=1) if what in ("cuts", "all") else ():
        for k, case in enumerate(list(cuts(attack.image))[mine]):
            outcome.add(attack.play(case, by_command=k % CLI_SHARE == 0))
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.adversarial.corruption", description=__doc__)
    parser.add_argument("what", nargs="?", choices=["flips", "cuts", "all"], default="all")
    parser.add_argument("--cases", type=int, default=20_000, help="of each of the two, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--every", type=int, default=1, help="one of so many")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    started = time.monotonic()
    numbers = slice(args.first, args.first + args.cases, args.every)
    outcome = Outcome()
    with multiprocessing.Pool(args.jobs) as pool:
        given = [(job, args.jobs, numbers, args.seed, args.what) for job in range(args.jobs)]
        for one in [pool.apply_async(run, arguments) for arguments in given]:
            outcome.add(one.get())
    for kind, count in [*sorted(outcome.done.items()), *sorted(outcome.results.items())]:
        print(f"{kind:40}{count:>8}")  # noqa: T201
    for line in outcome.violations[:50]:
        print(f"VIOLATION {line}")  # noqa: T201
    print(  # noqa: T201
        f"seed {args.seed}: {outcome.done.total()} cases in {time.monotonic() - started:.0f} s, "
        f"{len(outcome.violations)} violations"
    )
    return bool(outcome.violations)


if __name__ == "__main__":
    sys.exit(main())
