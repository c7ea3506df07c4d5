"""Provide cases of tests.adversarial.hostile: objects in place of a file, and names that lead elsewhere."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from scarctl.arena.arena import Arena
from scarctl.arena.folder import arena_folder, host_folder
from scarctl.arena.header import FILE
from scarctl.daemon import protocol
from scarctl.state.version import pack
from scarctl.store import Store
from tests.adversarial.image import LAYOUT, Image
from tests.adversarial.targets_store import signed
from tests.daemon.rig import copy_into
from tests.support.ranks import belong

LOCK, RECORDS = "lanes/0/lock", "lanes/0/log/*/*.json"
RECORDS = "lanes/0/log/*/*.json"
CANARY = "canary-from-outside"
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


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[Yard], None]
    tried: str = "store"
    """What is tried with it: store, arena, state."""


class Yard:
    """A folder with a store, a folder outside the store, and a record of files opened and changed there."""

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
        """Create the arena of a stopped run."""
        everything = np.arange(LAYOUT.partitions)
        arena = Arena.create(arena_folder(str(self.base), self.id), LAYOUT, run_id=self.id, epoch=9)
        assert copy_into(arena, everything, pack(9, 900), 9, whole="ab" * 16, extras={"text": "extras"})
        arena.take_over(0x7FFFFFF0)
        belong(arena, Store.open(self.store))
        arena.close()

    def tree(self) -> dict[str, object]:
        """Return names, kinds and contents of everything outside the store."""
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


def replaced(where: Callable[[Yard], Path], kind: str) -> Callable[[Yard], None]:
    """Put an object of `kind` in place of a file or folder, whose content moves outside."""

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


def _newest(yard: Yard, files: str) -> Path:
    return max(yard.store.glob(files))


STORE_PLACES: dict[str, Callable[[Yard], Path]] = {
    "settings": lambda y: y.store / "scarctl.json",
    "lock": lambda y: y.store / "lock",
    "layouts": lambda y: y.store / "layout",
    "layout": lambda y: next((y.store / "layout").glob("[0-9a-f]*")),
    "lanes": lambda y: y.store / "lanes",
    "lane": lambda y: y.store / "lanes/0",
    "terms": lambda y: y.store / "lanes/0/terms",
    "logs": lambda y: y.store / "lanes/0/log",
    "log": lambda y: _newest(y, "lanes/0/log/*"),
    "segments": lambda y: y.store / "lanes/0/seg",
    "term": lambda y: _newest(y, "lanes/0/terms/*"),
    "record": lambda y: _newest(y, RECORDS),
    "segment": lambda y: _newest(y, "lanes/0/seg/*"),
    "snapshots": lambda y: y.store / "snapshots",
    "snapshot": lambda y: y.store / "snapshots/first.json",
}
ARENA_PLACES: dict[str, Callable[[Yard], Path]] = {
    "host folder": lambda y: host_folder(str(y.base)),
    "arena folder": lambda y: arena_folder(str(y.base), y.id),
    "arena": lambda y: arena_folder(str(y.base), y.id) / FILE,
    "extras": lambda y: next(arena_folder(str(y.base), y.id).glob("extras-*")),
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
        yield Case(f"names: {k} as lane of a snapshot", lambda y, n=name: _lie(y, "places", n))  # type: ignore[misc]
        yield Case(f"names: {k} as creator of a snapshot", lambda y, n=name: _lie(y, "created", n))  # type: ignore[misc]
        yield Case(f"names: {k} as tensor of a state file", lambda y, n=name: _tensor(y, n), "state")  # type: ignore[misc]
    for k, name in enumerate(NAMES):
        if name != "..":
            yield Case(f"names: {k} as files in the store", lambda y, n=name: _strew(y, n))  # type: ignore[misc]
            yield Case(f"names: {k} as the store's folder", lambda y, n=name: _rename(y, n))  # type: ignore[misc]
            yield Case(f"names: {k} as the holder of the lock", lambda y, n=name: _holder(y, n))  # type: ignore[misc]


def _lie(yard: Yard, field: str, name: str) -> None:
    if field in ("segment", "layout"):
        path = _newest(yard, RECORDS)
        obj = json.loads(path.read_bytes())
        if field == "segment":
            obj["segment"]["name"] = name
        else:
            obj["layout"] = name
    else:
        path = yard.store / "snapshots/first.json"
        obj = json.loads(path.read_bytes())
        obj[field] = {name: obj["places"]["0"]} if field == "places" else name
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
        "lanes",
        "lanes/0",
        "lanes/0/terms",
        "lanes/0/log",
        "lanes/0/seg",
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
