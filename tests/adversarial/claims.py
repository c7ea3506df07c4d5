"""Small files that claim much: what a command takes more of than on an honest store, in a process of its own.

    python -m tests.adversarial.claims [CASE ...]

A case is a change of a store or a state file, all checksums right, and the commands that read it. The time is the
processor's, the memory the peak; both less what the same command takes on the store as it was.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.adversarial import claimed
from tests.adversarial.claimed import Ground
from tests.adversarial.image import Image, make
from tests.support import forkserver

SECONDS = 1.0
MEMORY = 256 << 20
PATIENCE = 120
GOOD_CODES = (0, 2, 3, 13, 16)


STORE = (
    ["inspect"],
    ["verify"],
    ["recover", "--lost", "all", "--output", "out.safetensors"],
    ["export", "all.safetensors"],
    ["prune", "--dry-run"],
)
ONE = (["inspect"],)
STOPPED = (["inspect"], ["recover", "--lost", "all"], ["recover", "--lost", "all", "--output", "o"])
INTO = (["checkpoint", "state.safetensors", "--step", "100"],)
STATE = (["checkpoint", "state.safetensors", "--step", "1"],)
TORCH = (["checkpoint", "state.pt", "--step", "1"],)
DCP = (["checkpoint", "dcp", "--step", "1"],)


@dataclass(frozen=True)
class Claim:
    """One case."""

    make: Callable[[Ground], None]
    commands: tuple[list[str], ...]
    new: bool = False
    """The commands create their own store."""
    short: bool = False
    """The claim is also tested in CI."""
    codes: tuple[int, ...] = GOOD_CODES
    """Exit codes, one of which is expected."""


_PICKLE = b"\x80\x04"
CLAIMS: dict[str, Claim] = {
    "layout of 2^28 partitions": Claim(claimed.partitions, STORE, short=True),
    "lists in a layout": Claim(claimed.in_json("layout", b"[]", 60 << 20), STORE),
    "objects in a layout": Claim(claimed.in_json("layout", b'{"a":0}', 60 << 20), ONE),
    "texts in a layout": Claim(claimed.in_json("layout", b'"ab"', 60 << 20), ONE),
    "objects that a layout may have": Claim(
        claimed.in_json("layout", b'{"a":0}', 8 * 1_048_000), ONE, codes=(0,)
    ),
    "texts that a layout may have": Claim(claimed.in_json("layout", b'"ab"', 5 * 2_880_000), ONE, codes=(0,)),
    "lists in a snapshot": Claim(claimed.in_json("snapshots", b"[]", 60 << 20), ONE),
    "numbers in a snapshot": Claim(claimed.in_json("snapshots", b"1000", 60 << 20), ONE),
    "a number of a million digits": Claim(
        claimed.in_json("snapshots", b"7" * 1_000_000, 2_000_000), ONE, short=True
    ),
    "partitions of one byte in the settings": Claim(
        claimed.cut_small(partition_bytes=1), INTO, short=True, codes=(2,)
    ),
    "partitions of one row in the settings": Claim(claimed.cut_small(rows=[["w", 1]]), INTO, codes=(2,)),
    "segments in a table": Claim(claimed.in_table(claimed.many_segments), STORE, short=True),
    "lists in a table": Claim(claimed.in_table(claimed.many_lists), STORE),
    "deep extras": Claim(claimed.in_extras(lambda: "[" * 500_000 + "]" * 500_000), STORE, short=True),
    "deep extras with names": Claim(
        claimed.in_extras(lambda: '{"dict":{"a":' * 300_000 + "0" + "}}" * 300_000), ONE, codes=(0,)
    ),
    "tuples in the extras": Claim(
        claimed.in_extras(lambda: claimed.listed(b'{"tuple":[]}', 390_000).decode()), STORE
    ),
    "numbers in the extras": Claim(
        claimed.in_extras(lambda: claimed.listed(b"7", 8_300_000).decode()), ONE, codes=(0,)
    ),
    "two million points of history": Claim(claimed.points(2_000_000, 1.0), ONE, short=True, codes=(0,)),
    "points of history as large as numbers are": Claim(
        claimed.all_points(1e308), (*STORE, ["recover", "--lost", "0", "--mode", "auto", "--output", "o"])
    ),
    "lists in an arena's layout": Claim(
        claimed.in_arena(lambda: claimed.listed(b"[]", 20 << 20)), STOPPED, short=True
    ),
    "deep lists in an arena's layout": Claim(claimed.in_arena(lambda: b"[" * (1 << 20)), STOPPED),
    "texts in an arena's layout": Claim(claimed.in_arena(lambda: claimed.listed(b'"ab"', 12 << 20)), STOPPED),
    "lists in the settings": Claim(claimed.settings_bomb, ONE),
    "lists in a segment's header": Claim(claimed.segment_header, STORE),
    "lists in a state file": Claim(claimed.state_header(b"[]"), STATE, new=True),
    "objects in a state file": Claim(claimed.state_header(b'{"a":0}'), STATE, new=True),
    "lists in the metadata of DCP": Claim(
        claimed.metadata(lambda: _PICKLE + b"]" * (64 << 20)), DCP, new=True
    ),
    "tuples in the metadata of DCP": Claim(
        claimed.metadata(lambda: _PICKLE + b"N" + b"\x85" * (64 << 20)), DCP, new=True
    ),
    "nothing in the metadata of DCP": Claim(
        claimed.metadata(lambda: _PICKLE + b"N" * (64 << 20)), DCP, new=True
    ),
    "texts in the metadata of DCP": Claim(
        claimed.metadata(lambda: _PICKLE + b"\x8c\x01a" * (20 << 20)), DCP, new=True
    ),
    "a memo of 2^31 in the metadata of DCP": Claim(
        claimed.metadata(lambda: _PICKLE + b"]r\xff\xff\xff\x7f."), DCP, new=True, short=True
    ),
    "lists in a .pt file": Claim(
        claimed.archive(0, lambda: b"\x80\x02" + b"]" * (60 << 20) + b"."), TORCH, new=True
    ),
    "calls that a .pt file may have": Claim(
        claimed.archive(0, lambda: b"\x80\x02" + b"ccollections\nOrderedDict\n)R" * 262_000 + b"."),
        TORCH,
        new=True,
        codes=(2,),
    ),
    "values that a .pt file may have": Claim(
        claimed.archive(0, lambda: b"\x80\x02](" + b"N" * 1_040_000 + b"e."), TORCH, new=True, codes=(2,)
    ),
    "lists in an old .pt file": Claim(
        claimed.legacy(lambda: b"\x80\x02" + b"]" * (60 << 20) + b"."),
        TORCH,
        new=True,
        codes=(13,),
    ),
    "a text of 4 GiB in an old .pt file": Claim(
        claimed.legacy(lambda: b"\x80\x02X" + b"\xff" * (80 << 20)), TORCH, new=True, codes=(13,)
    ),
    "64 GiB in an old .pt file": Claim(claimed.unbacked(keys=True), TORCH, new=True, short=True, codes=(13,)),
    "64 GiB that no key of an old .pt file names": Claim(
        claimed.unbacked(keys=False), TORCH, new=True, codes=(13,)
    ),
    "a .pt file of a million entries": Claim(claimed.huge_archive, TORCH, new=True, short=True),
}


_MEASURED = """
import atexit, re, resource, sys
from pathlib import Path
def measure(file):
    used = resource.getrusage(resource.RUSAGE_SELF)
    peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]
    Path(file).write_text(f"{used.ru_utime + used.ru_stime} {peak}")
atexit.register(measure, sys.argv.pop(1))
from scarctl.cli.main import main
main()
"""
"""Runs a command, and writes its processor seconds and its peak memory in KiB to a file."""


@dataclass(frozen=True)
class Cost:
    code: int
    seconds: float
    memory: int
    output: str


def run(ground: Ground, arguments: list[str], store: Path) -> Cost:
    """Measure a command's processor seconds and peak bytes, without those of importing torch."""
    environ = {
        **os.environ,
        "SCARCTL_ARENA_DIR": str(ground.root),
        "SCARCTL_DAEMON": "0",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.NamedTemporaryFile("r") as found:
        done = forkserver.run(
            ["-c", _MEASURED, found.name, *arguments, "--store", str(store)],
            cwd=ground.root,
            env=environ,
            timeout=PATIENCE,
        )
        seconds, memory = (found.read() or f"{PATIENCE} {1 << 20}").split()
    return Cost(done.returncode, float(seconds), int(memory) << 10, done.stdout + done.stderr)


@contextmanager
def ground(image: Image) -> Iterator[Ground]:
    """Make a new ground, in memory if possible."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="scarctl-claims-", dir=base) as root:
        yield Ground(Path(root), image)


class Claims:
    """Runs cases, and collects `violations`."""

    def __init__(self, *, seconds: float = SECONDS, memory: int = MEMORY) -> None:
        self.image = make(0, shards=2, rounds=1)
        self.seconds, self.memory = seconds, memory
        self.violations: list[str] = []
        self.lines: list[str] = []
        self._usual: dict[str, Cost] = {}

    def play(self, name: str, most: int | None = None) -> None:
        """Try a claim. most: number of its commands, of which all open the same file."""
        claim = CLAIMS[name]
        commands = claim.commands[:most]
        with ground(self.image) as there, tempfile.TemporaryDirectory(dir=there.root.parent) as made:
            claim.make(there)
            if len(commands) > 1:
                shutil.copytree(there.root, made, dirs_exist_ok=True)
            for number, arguments in enumerate(commands):
                if number:
                    # At the same path, from which an arena's folder gets its name.
                    shutil.rmtree(there.root)
                    shutil.copytree(made, there.root)
                usual = self._usual_cost(arguments, claim)
                cost = run(there, arguments, there.root / "new" if claim.new else there.store)
                self._judge(name, arguments, cost, usual)

    def _judge(self, name: str, arguments: list[str], cost: Cost, usual: Cost) -> None:
        claim = CLAIMS[name]
        seconds, memory = cost.seconds - usual.seconds, cost.memory - usual.memory
        line = f"{name}: {arguments[0]}: {seconds:.1f} s, {memory >> 20} MiB more; exit code {cost.code}"
        self.lines.append(line)
        if cost.code not in claim.codes or "unexpected" in cost.output:
            self.violations.append(f"{line}: {cost.output[-300:]!a}")
        elif seconds > self.seconds or memory > self.memory:
            self.violations.append(line)

    def _usual_cost(self, arguments: list[str], claim: Claim) -> Cost:
        """Measure the command on the unchanged store, or for a state file on another one of the same kind."""
        key = arguments[1] if claim.new else arguments[0]
        if key not in self._usual:
            with ground(self.image) as there:
                if key == "state.pt":
                    claimed.archive(0, lambda: b"\x80\x02}.")(there)
                elif key == "dcp":
                    claimed.metadata(lambda: _PICKLE + b"N.")(there)
                self._usual[key] = run(there, arguments, there.root / "new" if claim.new else there.store)
        return self._usual[key]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.adversarial.claims", description=__doc__)
    parser.add_argument("case", nargs="*", help="part of a case's name; default: all")
    args = parser.parse_args()
    claims = Claims()
    for name in CLAIMS:
        if not args.case or any(part in name for part in args.case):
            claims.play(name)
            while claims.lines:
                print(claims.lines.pop(0), flush=True)  # noqa: T201
    for line in claims.violations:
        print(f"VIOLATION {line}")  # noqa: T201
    return bool(claims.violations)


if __name__ == "__main__":
    sys.exit(main())
