"""Several writers on one store, none kept out by a lock: each is stopped, between two operations on files, while others
take over, and continues then as a zombie.

    python -m tests.adversarial.races --cases 12000 --seed 0

Half of the cases stop one writer at one of its operations and play another one whole; in the other half two or three
writers take turns at random, and answers get lost. Every hundredth case has real processes, one of them stopped by
SIGSTOP. After each case: a writer that reported a success finds its record in the log, all but the newest writer are
fenced, `verify` reads every byte, readers get what the log says, and so do those who go back to the newest sealed state
or to a snapshot.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import signal
import sys
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import scarctl.store.backends.remote_errors
from scarctl.store import Store
from scarctl.store.record import Record
from scarctl.store.term import Place as RecordPlace
from tests.adversarial.actors import Actor, Baton
from tests.adversarial.history import History, Violated
from tests.store.helpers import memory_folder
from tests.support.places import Folder, Memory, Raw

SCRIPTS = {
    "commits": ("open", "commit", "seal", "commit", "close"),
    "collects": ("open", "seal", "collect", "commit"),
    "compacts": ("open", "commit", "turn", "turn", "turn", "commit"),
    "renews": ("open", "seal", "commit", "renew", "commit", "collect", "commit"),
    "goes back": ("open", "back", "commit", "collect"),
    "goes back late": ("open", "seal", "commit", "collect", "back", "commit"),
    "snapshots": ("open", "seal", "snap", "drop", "collect"),
    "lives long": ("open", "commit", "seal", "collect", "commit", "commit", "seal", "collect", "collect"),
}
OTHERS = {"reads": ("read", "read", "snap", "read")}
LENGTHS = dict(zip(SCRIPTS, (60, 130, 110, 130, 120, 170, 130, 300), strict=True))
"""Approximate number of file operations of each script."""
PLACES = ("local", "memory")
_ROUND = 2 * len(PLACES) * len(SCRIPTS) ** 2
PROCESSES = 100
"""One in so many cases uses real processes."""


@dataclass(frozen=True)
class Case:
    """`scripts`: the actions of each writer. `schedule`: (writer, operations), one after the other; then all finish."""

    number: int
    place: str
    scripts: tuple[str, ...]
    schedule: tuple[tuple[int, int], ...]
    lossy: float
    seed: int
    processes: bool = False

    @staticmethod
    def draw(seed: int, number: int) -> Case:
        rng = random.Random(f"{seed}/{number}")
        own = rng.getrandbits(32)
        names = list(SCRIPTS)
        if number % 2 == 0:
            pair, place = divmod(number // 2 % (len(PLACES) * len(names) ** 2), len(PLACES))
            scripts = (names[pair % len(names)], names[pair // len(names)])
            length = LENGTHS[scripts[0]]
            until: tuple[tuple[int, int], ...] = ((0, rng.randrange(length)), (1, 1 << 60))
            return Case(number, PLACES[place], scripts, until, 0, own)
        if number % PROCESSES == 1:
            return Case(
                number, "local", tuple(rng.choices(names, k=2)), ((0, rng.randrange(150)),), 0, own, True
            )
        count = rng.choice((2, 2, 3))
        scripts = tuple(rng.choices([*names, *OTHERS], k=count))
        schedule = tuple(
            (rng.randrange(count), int(rng.choice((1, 5, 20, 80, 300)) * rng.uniform(0.2, 1)))
            for _ in range(rng.randrange(2, 12))
        )
        return Case(number, rng.choice(PLACES), scripts, schedule, rng.choice((0, 0, 0.02, 0.1)), own)


def _script(name: str) -> tuple[str, ...]:
    return {**SCRIPTS, **OTHERS}[name]


class Place:
    """The place of cases: each gets a copy of one store with some history."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        self.history = History()
        url, raw = self._new()
        Store.create(url)
        past = ("open", "commit", "seal", "snap", "commit", "seal", "commit", "commit", "close")
        Actor("past", Store.open(url), self.history, 1, gate=_go_on).play(past)
        self._files = {name: raw.get(name) for name in raw.names() if name != "lock"}
        self.remove(url)

    def _new(self) -> tuple[str, Raw]:
        if self.kind == "local":
            path = self.folder / uuid.uuid4().hex
            return str(path), Folder(path)
        root = f"/{uuid.uuid4().hex}"
        return f"memory:/{root}", Memory(root)

    def copy(self) -> str:
        """Return the address of a new copy."""
        url, raw = self._new()
        for name, data in self._files.items():
            raw.put(name, data)
        return url

    def remove(self, url: str) -> None:
        if self.kind == "local":
            shutil.rmtree(url)
        else:
            raw = Memory(url.removeprefix("memory:/"))
            raw.fs.rm(raw.root, recursive=True)


def _go_on(_: str) -> None:
    """Run without stopping any writer."""


def play(case: Case, place: Place) -> Counter[str]:
    """Run one race. Raises Violated; returns counts."""
    url, history = place.copy(), place.history.copy()
    counts: Counter[str] = Counter()
    try:
        if case.processes:
            actors, winners = _with_a_stopped_process(case, url, history, counts)
        else:
            baton = Baton(case.schedule, len(case.scripts))
            actors = [
                Actor(
                    f"writer {i}",
                    Store.open(url),
                    history,
                    case.seed + i,
                    gate=baton.gate(i),
                    lossy=case.lossy,
                )
                for i in range(len(case.scripts))
            ]
            work = [lambda a=a, s=s: a.play(_script(s)) for a, s in zip(actors, case.scripts, strict=True)]
            for error in baton.run(work):
                if error is not None:
                    raise error
            counts["switches"] += baton.switches
            winners = []
        winners += [actor for actor in actors if actor.is_writer()]
        if len(winners) > 1 or any(actor.lost for actor in winners):
            raise Violated(f"still writers: {[(actor.name, actor.lost) for actor in winners]}")
        store = Store.open(url)
        history.check(store)
        newest = Actor("the next", store, history, case.seed, gate=_go_on)
        newest.play(("open", "commit", "collect", "close"))
        if newest.lost is not None:
            raise Violated(f"the next writer: {newest.lost}")
        if case.number % 4 < 2:
            history.check(store)
        for actor in actors:
            counts.update(actor.counts)
    finally:
        place.remove(url)
    return counts


def _with_a_stopped_process(
    case: Case, url: str, history: History, counts: Counter[str]
) -> tuple[list[Actor], list[Actor]]:
    """Run the first script in a process that stops itself, the second here meanwhile. Return (actors, winners)."""
    report = Path(f"{url}.json")
    before = set(history.promised)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _be_stopped(case, url, history, report)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    try:
        _, status = os.waitpid(pid, os.WUNTRACED)
        other = Actor("the other", Store.open(url), history, case.seed + 1, gate=_go_on)
        other.play(_script(case.scripts[1]))
        if os.WIFSTOPPED(status):
            counts["processes stopped"] += 1
            os.kill(pid, signal.SIGCONT)
            _, status = os.waitpid(pid, 0)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    if status:
        raise Violated(f"the stopped process: status {status}")
    found = json.loads(report.read_text())
    report.unlink()
    for data, contents in found["tried"]:
        raw = bytes.fromhex(data)
        obj = json.loads(raw)
        at = RecordPlace.from_json(obj["place"], "")
        record = Record.parse(raw, "", shard=obj["lane"], place=at)
        history.places[record.shard, at] = record.digest
        history.records[record.digest] = (record, {int(i): bytes.fromhex(b) for i, b in contents.items()})
    history.acknowledged += [("the process", digest) for digest in found["acknowledged"]]
    for name in before - found["promised"].keys():
        history.promised.pop(name, None)
    for name in found["promised"].keys() - before:
        history.promised[name] = {int(shard): seq for shard, seq in found["promised"][name].items()}
    counts.update(found["counts"])
    zombie = Actor("the process", Store.open(url), history, 0, gate=_go_on)
    zombie.lost = found["lost"]
    return [other], [zombie] if found["writes"] else []


def _be_stopped(case: Case, url: str, history: History, report: Path) -> None:
    known, acknowledged, passed = set(history.records), len(history.acknowledged), 0
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        os.kill(os.getpid(), signal.SIGSTOP)

    def gate(_: str) -> None:
        nonlocal passed
        passed += 1
        if passed == case.schedule[0][1] and not stopped:
            stop()

    actor = Actor("the process", Store.open(url), history, case.seed, gate=gate)
    actor.play(_script(case.scripts[0]))
    if not stopped:
        stop()  # whether it still writes is checked when the other writer has finished
    writes = actor.is_writer()
    document = {
        "tried": [
            (record.data.hex(), {i: b.hex() for i, b in contents.items()})
            for digest, (record, contents) in history.records.items()
            if digest not in known
        ],
        "acknowledged": [digest for _, digest in history.acknowledged[acknowledged:]],
        "promised": history.promised,
        "lost": actor.lost,
        "writes": writes,
        "counts": actor.counts,
    }
    report.write_text(json.dumps(document))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases. Return 1 after a violation."""
    parser = argparse.ArgumentParser(prog="python -m tests.adversarial.races", description=__doc__)
    parser.add_argument("--cases", type=int, default=12000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="begin with this case")
    parser.add_argument("--step", type=int, default=1, help="only every so many cases")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end when this time is over")
    args = parser.parse_args(argv)
    folder = memory_folder()
    started = time.monotonic()
    counts: Counter[str] = Counter()
    failed = 0
    try:
        places = {kind: Place(kind, folder) for kind in PLACES}
        for number in range(args.first, args.cases, args.step):
            if time.monotonic() - started > args.seconds:
                break
            case = Case.draw(args.seed, number)
            counts["races"] += 1
            counts[f"  on {case.place}"] += 1
            try:
                counts.update(play(case, places[case.place]))
            except Exception as error:
                failed += 1
                print(f"{case}\n  {type(error).__name__}: {error}", file=sys.stderr, flush=True)  # noqa: T201
                if not isinstance(error, Violated):
                    traceback.print_exc()
                again = f"--seed {args.seed} --first {number} --cases {number + 1}"
                print(f"again: python -m tests.adversarial.races {again}", file=sys.stderr, flush=True)  # noqa: T201
    finally:
        shutil.rmtree(folder)
    for what, count in counts.items():
        print(f"{what:45}{count:>10,}")  # noqa: T201
    print(f"seed {args.seed}: {failed} violations, {time.monotonic() - started:.0f} s")  # noqa: T201
    return failed > 0


if __name__ == "__main__":
    logging.getLogger("scarctl").setLevel(logging.ERROR)
    scarctl.store.backends.remote_errors.FIRST_PAUSE = 1e-4  # requests with lost answers are repeated at once
    sys.exit(main())
