"""Files that are not what they should be, and names that lead elsewhere: refused, without a wait, and nothing outside
of the store is read, written or deleted.

    python -m tests.adversarial.hostile [CASE ...] [--cases N]

A case is a change of a store or of an arena's folder; commands and calls are then tried on it. `CASE` is part
of a name.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from click.testing import CliRunner
from safetensors.numpy import save_file

from scarctl.arena.arena import Arena
from scarctl.arena.folder import arena_folder, host_folder
from scarctl.arena.header import FILE
from scarctl.arena.queue import HandOverQueue
from scarctl.cli.main import cli
from scarctl.daemon import client, protocol
from scarctl.errors import ScarError
from scarctl.state.version import pack
from scarctl.store import Store
from tests.adversarial.image import LAYOUT, Image, make
from tests.adversarial.targets_store import signed

SECONDS = 20
"""A command that takes longer hangs."""
CANARY = "canary-from-outside"
GOOD_CODES = (0, 2, 3, 10, 11, 12, 13, 14, 15, 16, 17)
NAMES = (
    "a\x1b[2J\x1b]0;owned\x07b",
    "a\nscarctl: all is well",
    "a\x9b31mb",
    "a\r\x08b",
    "a\u202eb",
    "..",
    "a\udc80b",
)
LEADING_OUT = (
    "../../../outside/secret",
    "/etc/passwd",
    "..",
    "../outside",
    "a/../../b",
    "\0",
    "a\nb",
    "%2e%2e/x",
)


class Hang(BaseException):
    """A command does not end."""


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[Yard], None]
    tried: str = "store"
    """What is done with it: store, arena, state."""


class Yard:
    """A folder with a store, a folder outside of it, and a view of what is opened and changed there."""

    def __init__(self, image: Image) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="scarctl-hostile-")).resolve()
        self.store, self.outside = self.root / "run", self.root / "outside"
        image.write(self.store)
        (self.store / "lock").write_text("1 host\n")
        self.outside.mkdir()
        (self.outside / "secret").write_text(CANARY)
        (self.root / "work").mkdir()
        self.base = self.root / "arenas"
        self.base.mkdir(mode=0o700)
        self.id = Store.open(self.store).run_id
        self.state = self.root / "work" / "state.safetensors"
        self.sockets: list[socket.socket] = []

    def arena(self) -> None:
        """What a stopped run left."""
        everything = np.arange(LAYOUT.partitions)
        arena = Arena.create(arena_folder(str(self.base), self.id), LAYOUT, run_id=self.id, epoch=9)
        arena.begin(everything)
        arena.end(everything, pack(9, 900))
        arena.take_over(0x7FFFFFF0)
        arena.begin_lines(Store.open(self.store).lines())
        arena.close()
        HandOverQueue(arena.folder).put(
            version=pack(9, 900), ids=everything, whole="ab" * 16, extras={"text": "hand-over"}
        )

    def tree(self) -> dict[str, object]:
        """What is outside: names, kinds, content."""
        found: dict[str, object] = {}
        for path in sorted(self.outside.rglob("*")):
            status = path.lstat()
            content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            found[str(path)] = status.st_mode, content if status.st_size < 1 << 20 else status.st_size
        return found

    def end(self) -> None:
        for one in self.sockets:
            one.close()
        shutil.rmtree(self.root)


# -- what may lie in place of something ---------------------------------------------------------------------------


def replaced(where: Callable[[Yard], Path], kind: str) -> Callable[[Yard], None]:
    """Something of `kind` in place of a file or folder, whose content goes outside."""

    def change(yard: Yard) -> None:
        path = where(yard)
        there = yard.outside / f"moved-{path.name}"
        if path.is_dir():
            shutil.move(path, there)
        elif os.path.lexists(path):
            os.replace(path, there)
        else:
            there.write_text(CANARY)
        KINDS[kind](yard, path, there)

    return change


def _socket(yard: Yard, path: Path, there: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    yard.sockets.append(listener)
    listener.bind(str(yard.root / "s"))
    listener.listen()
    os.rename(yard.root / "s", path)


def _other(yard: Yard, path: Path, there: Path) -> None:
    if there.is_dir():
        path.write_text(CANARY)
    else:
        path.mkdir()


def _sparse(yard: Yard, path: Path, there: Path) -> None:
    shutil.copy(there, path) if there.is_file() else path.touch()
    os.truncate(path, 1 << 42)
    path.chmod(0o600)


def _hard(yard: Yard, path: Path, there: Path) -> None:
    if there.is_file():
        os.link(there, path)
    else:
        path.symlink_to(there)


KINDS: dict[str, Callable[[Yard, Path, Path], None]] = {
    "link": lambda yard, path, there: path.symlink_to(there),
    "relative link": lambda yard, path, there: path.symlink_to(os.path.relpath(there, path.parent)),
    "dangling link": lambda yard, path, there: path.symlink_to(yard.outside / "new"),
    "loop": lambda yard, path, there: path.symlink_to(path.name),
    "link to a device": lambda yard, path, there: path.symlink_to("/dev/zero"),
    "link to a pipe": lambda yard, path, there: (
        os.mkfifo(yard.outside / "pipe"),
        path.symlink_to(yard.outside / "pipe"),
    )[1],
    "pipe": lambda yard, path, there: os.mkfifo(path, 0o600),
    "socket": _socket,
    "folder for file or file for folder": _other,
    "hard link": _hard,
    "huge sparse file": _sparse,
}


def _newest(yard: Yard, folder: str) -> Path:
    return max(path for path in (yard.store / folder).iterdir())


STORE_PLACES: dict[str, Callable[[Yard], Path]] = {
    "settings": lambda y: y.store / "scarctl.json",
    "lock": lambda y: y.store / "lock",
    "layouts": lambda y: y.store / "layout",
    "layout": lambda y: next((y.store / "layout").iterdir()),
    "shards": lambda y: y.store / "shards",
    "shard": lambda y: y.store / "shards/0",
    "log": lambda y: y.store / "shards/0/log",
    "segments": lambda y: y.store / "shards/0/seg",
    "indexes": lambda y: y.store / "shards/0/index",
    "record": lambda y: _newest(y, "shards/0/log"),
    "segment": lambda y: _newest(y, "shards/0/seg"),
    "index": lambda y: _newest(y, "shards/0/index"),
    "snapshots": lambda y: y.store / "snapshots",
    "snapshot": lambda y: y.store / "snapshots/first.json",
}
ARENA_PLACES: dict[str, Callable[[Yard], Path]] = {
    "host folder": lambda y: host_folder(str(y.base)),
    "arena folder": lambda y: arena_folder(str(y.base), y.id),
    "arena": lambda y: arena_folder(str(y.base), y.id) / FILE,
    "hand-over": lambda y: next(arena_folder(str(y.base), y.id).glob("handover-*")),
    "daemon's socket": lambda y: host_folder(str(y.base)) / protocol.SOCKET,
    "daemon's lock": lambda y: host_folder(str(y.base)) / "daemon.lock",
    "daemon's log": lambda y: host_folder(str(y.base)) / "daemon.log",
}
STATE_KINDS = [kind for kind in KINDS if kind not in ("link", "relative link", "hard link")]


def _in_arena(change: Callable[[Yard], None]) -> Callable[[Yard], None]:
    def both(yard: Yard) -> None:
        yard.arena()
        change(yard)

    return both


def cases() -> Iterator[Case]:
    for place, where in STORE_PLACES.items():
        for kind in KINDS:
            yield Case(f"store: {kind} as {place}", replaced(where, kind))
        yield Case(f"store: unreadable {place}", lambda yard, where=where: os.chmod(where(yard), 0))  # type: ignore[misc]
    for place, where in ARENA_PLACES.items():
        for kind in KINDS:
            yield Case(f"arena: {kind} as {place}", _in_arena(replaced(where, kind)), "arena")
    for kind in STATE_KINDS:
        yield Case(f"state: {kind} as state file", replaced(lambda y: y.state, kind), "state")
        yield Case(
            f"state: {kind} as scarctl.toml", replaced(lambda y: y.root / "work/scarctl.toml", kind), "state"
        )
    for k, name in enumerate((*NAMES, *LEADING_OUT)):
        yield Case(f"names: {k} as segment in a record", lambda y, n=name: _lie(y, "segment", n))  # type: ignore[misc]
        yield Case(f"names: {k} as layout of a record", lambda y, n=name: _lie(y, "layout", n))  # type: ignore[misc]
        yield Case(f"names: {k} as shard of a snapshot", lambda y, n=name: _lie(y, "seqs", n))  # type: ignore[misc]
        yield Case(f"names: {k} as creator of a snapshot", lambda y, n=name: _lie(y, "created", n))  # type: ignore[misc]
        yield Case(f"names: {k} as tensor of a state file", lambda y, n=name: _tensor(y, n), "state")  # type: ignore[misc]
    for k, name in enumerate(NAMES):
        if name != "..":
            yield Case(f"names: {k} as files in the store", lambda y, n=name: _strew(y, n))  # type: ignore[misc]
            yield Case(f"names: {k} as the store's folder", lambda y, n=name: _rename(y, n))  # type: ignore[misc]
            yield Case(f"names: {k} as the holder of the lock", lambda y, n=name: _holder(y, n))  # type: ignore[misc]


def _lie(yard: Yard, field: str, name: str) -> None:
    if field in ("segment", "layout"):
        path = _newest(yard, "shards/0/log")
        obj = json.loads(path.read_bytes())
        if field == "segment":
            obj["segment"]["name"] = name
        else:
            obj["layout"] = name
    else:
        path = yard.store / "snapshots/first.json"
        obj = json.loads(path.read_bytes())
        obj[field] = {name: 1} if field == "seqs" else name
    path.write_bytes(signed(obj))


def _tensor(yard: Yard, name: str) -> None:
    values = {"w": np.zeros(3, np.float32)}
    save_file(values, yard.state)
    data = yard.state.read_bytes()
    head = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps({name: json.loads(data[8:head])["w"]}).encode()
    yard.state.write_bytes(len(header).to_bytes(8, "little") + header + data[head:])


def _strew(yard: Yard, name: str) -> None:
    for folder in (
        "",
        "layout",
        "shards",
        "shards/0",
        "shards/0/log",
        "shards/0/seg",
        "shards/0/index",
        "snapshots",
    ):
        (yard.store / folder / name).write_text(CANARY)
        (yard.store / folder / f"{name}.json").mkdir()


def _rename(yard: Yard, name: str) -> None:
    new = yard.root / name
    yard.store.rename(new)
    yard.store = new


def _holder(yard: Yard, name: str) -> None:
    import fcntl

    path = yard.store / "lock"
    path.write_bytes(f"1 {name}".encode("utf-8", "surrogateescape"))
    held = path.open()
    fcntl.flock(held, fcntl.LOCK_EX)
    yard.sockets.append(held)  # type: ignore[arg-type]


# -- what is tried ------------------------------------------------------------------------------------------------


class Attack:
    """Plays cases; `violations` has what must not be."""

    def __init__(self) -> None:
        self.image = make(0, shards=2, rounds=1)
        self.violations: list[str] = []
        self.commands = 0
        self.codes: dict[int, int] = {}
        self._watched: Path | None = None
        self._touched: list[str] = []
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._watched is not None and event in (
            "open",
            "os.remove",
            "os.rename",
            "os.link",
            "os.mkdir",
            "os.truncate",
        ):
            for path in arguments[:2]:
                if isinstance(path, str | bytes | os.PathLike):
                    real = os.path.realpath(os.fsdecode(path))
                    flags = arguments[2] if event == "open" and isinstance(arguments[2], int) else 0
                    # A link that is not followed, but refused, moved or deleted, leads nowhere. Of files with an
                    # opener of their own the first event does not know the flags; settings may be a link.
                    own = event != "open" or flags & os.O_NOFOLLOW or arguments[1] is not None
                    unfollowed = own and os.path.islink(path)
                    exists = event == "os.mkdir" and os.path.lexists(path)
                    known = os.fsdecode(path) == "scarctl.toml"
                    if Path(real).is_relative_to(self._watched) and not (unfollowed or exists or known):
                        self._touched.append(f"{event} {os.fsdecode(path)!r}")

    def play(self, case: Case) -> None:
        yard = Yard(self.image)
        try:
            save_file({"w": np.arange(4, dtype=np.float32)}, yard.state)
            case.make(yard)
            before = yard.tree()
            unprivileged = "unreadable" in case.name and os.geteuid() == 0
            if unprivileged:
                for path in (yard.root, *yard.root.rglob("*")):
                    os.chown(path, 65534, 65534, follow_symlinks=False)
                os.seteuid(65534)
            self._touched, self._watched = [], yard.outside
            try:
                getattr(self, f"_{case.tried}")(case, yard)
            finally:
                self._watched = None
                if unprivileged:
                    os.seteuid(0)
            if yard.tree() != before:
                self.violations.append(f"{case.name}: something outside has changed")
            if self._touched and "hard link" not in case.name:
                self.violations.append(f"{case.name}: opened outside: {sorted(set(self._touched))[:3]}")
        finally:
            yard.end()

    def _store(self, case: Case, yard: Yard) -> None:
        store, out = str(yard.store), str(yard.root / "work/out.safetensors")
        for arguments in (
            ["verify"],
            ["verify", "--json"],
            ["inspect"],
            ["recover", "--lost", "all", "--output", out],
            ["recover", "--lost", "all", "--mode", "rollback", "--snapshot", "first", "--output", out],
            ["snapshot", "delete", "--yes", "../../outside/secret"],
            ["snapshot", "delete", "--yes", "first"],
            ["export", str(yard.root / "work/all.safetensors")],
            ["recover", "--lost", "0", "--mode", "rollback", "--into", str(yard.state)],
            ["checkpoint", str(yard.state), "--step", "1000"],
        ):
            self._command(case, yard, [*arguments, "--store", store])

    def _arena(self, case: Case, yard: Yard) -> None:
        store = str(yard.store)
        for arguments in (
            ["inspect", "--store", store],
            ["inspect", "--store", store, "--json"],
            ["daemon", "status"],
            ["daemon", "stop", "--reap"],
            ["recover", "--lost", "0", "--store", store],
        ):
            self._command(case, yard, arguments)
        folder = host_folder(str(yard.base))
        self._call(case, lambda: Arena.share(arena_folder(str(yard.base), yard.id), run_id=yard.id))
        folders = host_folder(str(yard.base)), arena_folder(str(yard.base), yard.id)
        if all(folder.is_dir() and not folder.is_symlink() for folder in folders):  # sessions see to that
            queue = HandOverQueue(arena_folder(str(yard.base), yard.id))
            self._call(case, lambda: queue.pending())
        if "daemon" in case.name or "host" in case.name:
            self._call(case, lambda: client.connect(folder, patience=3).close())
            self._command(case, yard, ["daemon", "stop"])

    def _state(self, case: Case, yard: Yard) -> None:
        for arguments in (
            ["checkpoint", str(yard.state), "--step", "1", "--store", str(yard.root / "new")],
            ["inspect", "--store", str(yard.root / "new")],
            ["recover", "--lost", "all", "--into", str(yard.state), "--store", str(yard.store)],
        ):
            self._command(case, yard, arguments)

    def _call(self, case: Case, attempt: Callable[[], object]) -> None:
        with _bounded():
            try:
                attempt()
            except ScarError:
                return
            except (Exception, Hang) as error:
                self.violations.append(f"{case.name}: {type(error).__name__}: {error}")

    def _command(self, case: Case, yard: Yard, arguments: Sequence[str]) -> None:
        self.commands += 1
        environ = {"SCARCTL_ARENA_DIR": str(yard.base), "SCARCTL_DAEMON": "0"}
        with (
            contextlib.chdir(yard.root / "work")
            if hasattr(contextlib, "chdir")
            else _chdir(yard.root / "work"),
            _bounded(),
        ):
            done = CliRunner(env=environ).invoke(cli, list(arguments))
        self.codes[done.exit_code] = self.codes.get(done.exit_code, 0) + 1
        shown = " ".join(arguments).replace(str(yard.root), "")
        output = done.stdout + done.stderr
        if done.exit_code not in GOOD_CODES or "unexpected" in output:
            self.violations.append(f"{case.name}: {shown!a} ends with {done.exit_code}: {output[-300:]!a}")
        if CANARY in output:
            self.violations.append(f"{case.name}: {shown!a} shows what lies outside")
        if not all(line.isprintable() for line in output.split("\n")) or "\nscarctl: all is well" in output:
            self.violations.append(f"{case.name}: {shown!a} sends control characters: {output[-300:]!a}")


@contextlib.contextmanager
def _chdir(folder: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    def hang(number: int, frame: FrameType | None) -> None:
        raise Hang(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.adversarial.hostile", description=__doc__)
    parser.add_argument("case", nargs="*", help="part of a case's name; default: all")
    parser.add_argument("--cases", type=int, default=10_000, help="at most")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("scarctl").addHandler(logging.NullHandler())
    attack, started, count = Attack(), time.monotonic(), 0
    for case in cases():
        if count < args.cases and (not args.case or any(part in case.name for part in args.case)):
            attack.play(case)
            count += 1
    for line in attack.violations[:60]:
        print(f"VIOLATION {line}")  # noqa: T201
    codes = ", ".join(f"{code}: {n}" for code, n in sorted(attack.codes.items()))
    print(  # noqa: T201
        f"{count} cases, {attack.commands} commands in {time.monotonic() - started:.0f} s; exit codes {codes}; "
        f"{len(attack.violations)} violations"
    )
    return bool(attack.violations)


if __name__ == "__main__":
    sys.exit(main())
