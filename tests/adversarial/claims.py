"""Small files that claim much: what a command takes more of than on an honest store, in a process of its own.

    python -m tests.adversarial.claims [CASE ...]

A case is a change of a store or a state file, all checksums right, and the commands that read it. The time is the
processor's, the memory the peak; both less what the same command takes on the store as it was.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from scarctl.state.layout import Layout
from scarctl.store.format import canonical, checksum
from tests.adversarial.image import Image, make

SECONDS = 1.0
MEMORY = 256 << 20
PATIENCE = 120
GOOD_CODES = (0, 1, 2, 3, 10, 13, 16)
HUGE = 1 << 28


def signed(obj: dict[str, Any]) -> bytes:
    """A JSON file of a store with a right checksum."""
    return canonical({**obj, "checksum": checksum(obj)})


class Ground:
    """A store, state files of each kind, and a folder to write to."""

    def __init__(self, root: Path, image: Image) -> None:
        self.root = root
        self.store = root / "run"
        self.state = root / "state.safetensors"
        self.torch = root / "state.pt"
        self.dcp = root / "dcp"
        image.write(self.store)
        save_file({"w": np.arange(4, dtype=np.float32)}, self.state)

    def rewrite(self, folder: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Change every JSON file of a folder of the store."""
        for path in (self.store / folder).iterdir():
            path.write_bytes(signed(change(json.loads(path.read_bytes()))))

    def relaid(self, layout: Layout) -> None:
        """Give the store another layout: one record per shard, of an epoch, names it."""
        digest = layout.digest
        for path in (self.store / "layout").iterdir():
            path.unlink()
        text = {"format": 1, "kind": "layout", "digest": digest, "layout": layout.to_json()}
        (self.store / "layout" / f"{digest}.json").write_bytes(signed(text))
        for path in (self.store / "snapshots").iterdir():
            path.unlink()
        for log in (self.store / "shards").glob("*/log"):
            first, *others = sorted(log.iterdir())
            obj = json.loads(sorted([first, *others])[-1].read_bytes())
            for name in ("seg", "index"):
                for path in (log.parent / name).iterdir():
                    path.unlink()
            for path in (first, *others):
                path.unlink()
            obj |= {"seq": 0, "kind": "epoch", "parent": "", "segment": None, "partitions": 0, "boundary": 0}
            obj |= {"layout": digest, "sealed": False, "extras": False, "base": None, "step": -1}
            (log / f"{0:020d}.json").write_bytes(signed(obj))


def _bomb(obj: dict[str, Any], unit: bytes, size: int, key: str = "zzz") -> bytes:
    """`obj` with a list of `unit` that makes it as long as may be; its checksum fits."""
    import hashlib

    body = b"[" + b",".join([unit] * (size // (len(unit) + 1))) + b"]"
    plain = canonical({k: v for k, v in obj.items() if k != "checksum"})
    inner = plain[:-1] + b',"%s":' % key.encode() + body + b"}"
    digest = hashlib.sha256(inner).hexdigest()
    head = canonical({**{k: v for k, v in obj.items() if k != "checksum"}, "checksum": digest})
    return head[:-1] + b',"%s":' % key.encode() + body + b"}"


def _json(folder: str, unit: bytes, size: int) -> Callable[[Ground], None]:
    def change(ground: Ground) -> None:
        for path in (ground.store / folder).iterdir():
            path.write_bytes(_bomb(json.loads(path.read_bytes()), unit, size))

    return change


def _partitions(ground: Ground) -> None:
    from scarctl.state.layout import TensorSpec, build_layout

    ground.relaid(build_layout([("w", "parameter", (TensorSpec("", "F32", (HUGE, 1)),))], rows={"w": 1}))


def _header(content: bytes, path: Path) -> None:
    content += b" " * (-len(content) % 8)
    path.write_bytes(len(content).to_bytes(8, "little") + content)


def _segment(ground: Ground) -> None:
    for path in sorted((ground.store / "shards").glob("*/seg/*"))[-1:]:
        _header(b'{"a":[' + b"[]," * (20 << 20) + b"[]" + b"]}", path)


def _state_header(unit: bytes) -> Callable[[Ground], None]:
    return lambda ground: _header(
        b'{"a":[' + b",".join([unit] * ((60 << 20) // (len(unit) + 1))) + b"]}", ground.state
    )


def _metadata(content: bytes) -> Callable[[Ground], None]:
    def change(ground: Ground) -> None:
        ground.dcp.mkdir()
        (ground.dcp / ".metadata").write_bytes(content)

    return change


def _archive(entries: int, content: bytes) -> Callable[[Ground], None]:
    def change(ground: Ground) -> None:
        with zipfile.ZipFile(ground.torch, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr("archive/data.pkl", content)
            archive.writestr("archive/version", b"3\n")
            for number in range(entries):
                archive.writestr(f"archive/data/{number}", b"")

    return change


def _huge_archive(ground: Ground) -> None:
    """A directory of a million entries, made without a million calls."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
    data = buffer.getvalue()
    at = data.rindex(b"PK\x01\x02")
    end = data.rindex(b"PK\x05\x06")
    entry, count = data[at:end], 1_000_000
    directory = entry * count
    eocd64 = b"PK\x06\x06" + (44).to_bytes(8, "little") + bytes([45, 0, 45, 0]) + bytes(8)
    eocd64 += (
        count.to_bytes(8, "little") * 2 + len(directory).to_bytes(8, "little") + at.to_bytes(8, "little")
    )
    locator = (
        b"PK\x06\x07" + bytes(4) + (at + len(directory)).to_bytes(8, "little") + (1).to_bytes(4, "little")
    )
    tail = b"PK\x05\x06" + bytes(4) + b"\xff\xff" * 2 + b"\xff\xff\xff\xff" * 2 + bytes(2)
    ground.torch.write_bytes(data[:at] + directory + eocd64 + locator + tail)


STORE = (
    ["inspect"],
    ["verify"],
    ["recover", "--lost", "all", "--output", "out.safetensors"],
    ["export", "all.safetensors"],
    ["prune", "--dry-run"],
)
ONE = (["inspect"],)
STATE = (["checkpoint", "state.safetensors", "--step", "1"],)
TORCH = (["checkpoint", "state.pt", "--step", "1"],)
DCP = (["checkpoint", "dcp", "--step", "1"],)


@dataclass(frozen=True)
class Claim:
    """One case."""

    make: Callable[[Ground], None]
    commands: tuple[list[str], ...]
    new: bool = False
    """The commands make a store of their own."""
    short: bool = False
    """Also played in CI."""


_PICKLE = b"\x80\x04"
CLAIMS: dict[str, Claim] = {
    "layout of 2^28 partitions": Claim(_partitions, STORE, short=True),
    "lists in a layout": Claim(_json("layout", b"[]", 60 << 20), STORE, short=True),
    "objects in a layout": Claim(_json("layout", b'{"a":0}', 60 << 20), ONE),
    "texts in a layout": Claim(_json("layout", b'"ab"', 60 << 20), ONE, short=True),
    "lists in a snapshot": Claim(_json("snapshots", b"[]", 60 << 20), ONE, short=True),
    "numbers in a snapshot": Claim(_json("snapshots", b"1000", 60 << 20), ONE),
    "a number of a million digits": Claim(_json("snapshots", b"7" * 1_000_000, 2_000_000), ONE, short=True),
    "lists in the settings": Claim(
        lambda ground: (
            (ground.store / "scarctl.json").write_bytes(
                _bomb(json.loads((ground.store / "scarctl.json").read_bytes()), b"[]", 900_000)
            )
            and None
        ),
        ONE,
    ),
    "lists in a segment's header": Claim(_segment, STORE),
    "lists in a state file": Claim(_state_header(b"[]"), STATE, new=True, short=True),
    "objects in a state file": Claim(_state_header(b'{"a":0}'), STATE, new=True),
    "lists in the metadata of DCP": Claim(_metadata(_PICKLE + b"]" * (64 << 20)), DCP, new=True, short=True),
    "tuples in the metadata of DCP": Claim(_metadata(_PICKLE + b"N" + b"\x85" * (64 << 20)), DCP, new=True),
    "nothing in the metadata of DCP": Claim(_metadata(_PICKLE + b"N" * (64 << 20)), DCP, new=True),
    "texts in the metadata of DCP": Claim(_metadata(_PICKLE + b"\x8c\x01a" * (20 << 20)), DCP, new=True),
    "a memo of 2^31 in the metadata of DCP": Claim(
        _metadata(_PICKLE + b"]r\xff\xff\xff\x7f."), DCP, new=True, short=True
    ),
    "lists in a .pt file": Claim(
        _archive(0, b"\x80\x02" + b"]" * (60 << 20) + b"."), TORCH, new=True, short=True
    ),
    "a .pt file of a million entries": Claim(_huge_archive, TORCH, new=True, short=True),
}


_MEASURED = """
import atexit, re, sys
from pathlib import Path
peak = sys.argv.pop(1)
found = lambda: re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]
atexit.register(lambda: Path(peak).write_text(found()))
from scarctl.cli.main import main
main()
"""
"""Runs a command, and leaves its peak memory in KiB in a file."""


@dataclass(frozen=True)
class Cost:
    code: int
    seconds: float
    memory: int
    output: str


def run(ground: Ground, arguments: list[str], store: Path) -> Cost:
    """What one command takes: processor seconds and peak bytes."""
    environ = {
        **os.environ,
        "SCARCTL_ARENA_DIR": str(ground.root),
        "SCARCTL_DAEMON": "0",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryFile() as output, tempfile.NamedTemporaryFile("r") as peak:
        process = subprocess.Popen(
            [sys.executable, "-c", _MEASURED, peak.name, *arguments, "--store", str(store)],
            cwd=ground.root,
            env=environ,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read().decode(errors="replace")
        # Not ru_maxrss: that counts what the parent had when it made the process.
        memory = int(peak.read() or 1 << 30) << 10
    return Cost(process.returncode, usage.ru_utime + usage.ru_stime, memory, text)


@contextmanager
def ground(image: Image) -> Iterator[Ground]:
    """A fresh one; in memory where there is some."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="scarctl-claims-", dir=base) as root:
        yield Ground(Path(root), image)


class Claims:
    """Plays cases; `violations` has what must not be."""

    def __init__(self, *, seconds: float = SECONDS, memory: int = MEMORY) -> None:
        self.image = make(0, shards=2, rounds=1)
        self.seconds, self.memory = seconds, memory
        self.violations: list[str] = []
        self.lines: list[str] = []
        self._usual: dict[str, Cost] = {}

    def play(self, name: str) -> None:
        claim = CLAIMS[name]
        for arguments in claim.commands:
            usual = self._usual_cost(arguments, claim)
            with ground(self.image) as there:
                claim.make(there)
                cost = run(there, arguments, there.root / "new" if claim.new else there.store)
            seconds, memory = cost.seconds - usual.seconds, cost.memory - usual.memory
            line = f"{name}: {arguments[0]}: {seconds:.1f} s, {memory >> 20} MiB more; exit code {cost.code}"
            self.lines.append(line)
            if cost.code not in GOOD_CODES or "unexpected" in cost.output:
                self.violations.append(f"{line}: {cost.output[-300:]!a}")
            elif seconds > self.seconds or memory > self.memory:
                self.violations.append(line)

    def _usual_cost(self, arguments: list[str], claim: Claim) -> Cost:
        """On the store as it was; of a state file, on one of the same kind."""
        key = arguments[1] if claim.new else arguments[0]
        if key not in self._usual:
            with ground(self.image) as there:
                if key == "state.pt":
                    _archive(0, b"\x80\x02}.")(there)
                elif key == "dcp":
                    _metadata(_PICKLE + b"N.")(there)
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
