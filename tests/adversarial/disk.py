"""Record the system calls below a folder, and make the files that a loss of power may leave of them.

The model is harsher than any file system. A file's bytes are safe after an fsync of the file, a name is safe after an
fsync of its folder, and nothing else is safe. What is not may be there, or not, or in part: bytes torn anywhere, pages
that are zeros or rubbish, names in any combination, a deleted name back again, each independently of all others and of
the order in which things were done.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.failpoint import Killed

PAGE = 4096

_FORBIDDEN = (
    *("writev", "pwritev", "truncate", "rmdir", "removedirs", "renames", "symlink", "mkfifo", "mknod"),
    *("sendfile", "copy_file_range", "splice", "posix_fallocate", "fdatasync", "sync", "setxattr"),
)
"""Calls that would change files and are not modelled. The store does not use them; a use must be noticed."""


@dataclass
class Event:
    """One change of the disk; numbers identify files and folders permanently."""

    kind: str
    """"name" (in folder `node`, `name` is `value` from now on: a number or None), "data" (file `node` holds
    `value` from now on), "fsync" (of `node`), "new" (`node` is a folder)."""
    node: int
    name: str = ""
    value: Any = None
    site: str = ""
    """Of an fsync: the call site, and the kind of file."""


@dataclass
class _File:
    safe: bytes = b""
    now: bytes = b""


@dataclass
class _Folder:
    safe: dict[str, int] = field(default_factory=dict)
    since: dict[str, list[int | None]] = field(default_factory=dict)
    """For each name its values since the last fsync, oldest first."""

    def options(self, name: str) -> list[int | None]:
        return [self.safe.get(name), *self.since.get(name, [])]

    @property
    def names(self) -> list[str]:
        return sorted({*self.safe, *self.since})

    def now(self) -> dict[str, int]:
        newest = {name: self.options(name)[-1] for name in self.names}
        return {name: number for name, number in newest.items() if number is not None}


class Disk:
    """What is certainly on the disk after some events, and what may be."""

    def __init__(self) -> None:
        self.nodes: dict[int, _File | _Folder] = {0: _Folder()}

    def play(self, events: Iterable[Event], *, without: str | None = None) -> None:
        """Apply an event. `without`: fsyncs of this site have no effect."""
        for event in events:
            node = self.nodes.get(event.node)
            if event.kind == "new":
                self.nodes[event.node] = _Folder()
            elif event.kind == "name":
                self.folder(event.node).since.setdefault(event.name, []).append(event.value)
            elif event.kind == "data":
                file = self.nodes.setdefault(event.node, _File())
                assert isinstance(file, _File)
                file.now = event.value
            elif event.site == without:
                continue
            elif isinstance(node, _File):
                node.safe = node.now
            else:
                folder = self.folder(event.node)
                folder.safe, folder.since = folder.now(), {}

    def folder(self, number: int) -> _Folder:
        node = self.nodes[number]
        assert isinstance(node, _Folder)
        return node

    def unsafe(self) -> int:
        """Return how many names and files are not safe."""
        return sum(
            len(node.since) if isinstance(node, _Folder) else node.safe != node.now
            for node in self.nodes.values()
        )

    def write(self, target: Path, loss: Loss, number: int = 0) -> None:
        """Create the folder `target` as the power loss has left it."""
        target.mkdir()
        folder = self.folder(number)
        for name in folder.names:
            options = folder.options(name)
            value = options[0] if len(options) == 1 else loss.name((number, name), options)
            node = None if value is None else self.nodes[value]
            if isinstance(node, _Folder):
                assert value is not None
                self.write(target / name, loss, value)
            elif node is not None:
                data = node.safe if node.safe == node.now else loss.data(value, node.safe, node.now)
                (target / name).write_bytes(data)


class Loss:
    """Decides about each change that is not safe.

    `kept`: the probability that it survives, in its newest state with all bytes. `but_one`: one random change has the
    opposite fate: it alone is lost, or it alone survives.
    """

    def __init__(self, rng: np.random.Generator, kept: float, *, but_one: int | None = None) -> None:
        self._rng = rng
        self._kept = kept
        self._but = but_one
        self._met = 0
        self._files: dict[int | None, bytes] = {}

    @staticmethod
    def draw(rng: np.random.Generator, unsafe: int) -> Loss:
        kept = float(rng.choice([0.0, 0.0, 0.2, 0.5, 0.8, 1.0]))
        one = kept in (0.0, 1.0) and unsafe > 1 and bool(rng.integers(4))
        return Loss(rng, kept, but_one=int(rng.integers(unsafe)) if one else None)

    def _keeps(self) -> bool:
        self._met += 1
        return (self._rng.random() < self._kept) != (self._met - 1 == self._but)

    def name(self, key: object, options: list[int | None]) -> int | None:
        if self._keeps():
            return options[-1]
        older = options[:-1] if 0 < self._kept < 1 else options[:1]
        return older[int(self._rng.integers(len(older)))]

    def data(self, number: int | None, safe: bytes, now: bytes) -> bytes:
        """Return a file's bytes after the loss of power. Under two names it is one file."""
        if number not in self._files:
            self._files[number] = now if self._keeps() else self._torn(safe, now)
        return self._files[number]

    def _torn(self, safe: bytes, now: bytes) -> bytes:
        rng = self._rng
        how = rng.choice(["none", "prefix", "pages", "rubbish", "byte"])
        if how == "none" or not now:
            return safe
        if how == "prefix":
            return now[: int(rng.integers(len(now)))]
        data = bytearray(now)
        if how == "byte":
            data[int(rng.integers(len(data)))] ^= int(rng.integers(1, 256))
            return bytes(data)
        pages = range(0, len(data), PAGE)
        # The length reached the disk, but some of the pages did not.
        lost = [page for page in pages if rng.random() < 0.5] or [int(rng.choice(pages))]
        for page in lost:
            length = len(data[page : page + PAGE])
            data[page : page + PAGE] = bytes(length) if how == "pages" else rng.bytes(length)
        return bytes(data)


class Recorder:
    """Records what this process does below `base`. Existing files are safe, and recorded as if just made.

    `die_at`: number of the changing call before which the process dies: from then on every call raises Killed and does
    nothing. `die_synced`: the same, before the fsync of a folder with this number.
    """

    def __init__(self, base: Path) -> None:
        self.base = base
        self.events: list[Event] = []
        self.calls = 0
        self.die_at: int | None = None
        self.die_synced: int | None = None
        self.fail_sync: int | None = None
        """Number of fsyncs until one fails, and makes nothing safe."""
        self.dead = False
        self.before_fsync: Callable[[str], None] | None = None
        """Called with the path, relative to `base`: actions of other processes at that moment."""
        self._live = Disk()
        self._numbers = 0
        self._lock = threading.RLock()
        self._fds: dict[int, int] = {}
        self._real = {name: getattr(os, name) for name in _RECORDED}
        self._take(base, 0)

    def __enter__(self) -> Recorder:
        for name in _RECORDED:
            setattr(os, name, self._alone(getattr(self, f"_{name}")))
        for name in _FORBIDDEN:
            if hasattr(os, name):
                self._real[name] = getattr(os, name)
                setattr(os, name, self._unknown(name))
        return self

    def __exit__(self, *_: object) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)

    def check_complete(self) -> None:
        """Check that no change has bypassed the recorder: the model's tree equals the real one."""

        def tree(folder: Path, number: int) -> None:
            now = self._live.folder(number).now()
            assert sorted(os.listdir(folder)) == sorted(now), folder
            for name, child in now.items():
                node = self._live.nodes[child]
                if isinstance(node, _Folder):
                    tree(folder / name, child)
                else:
                    assert (folder / name).read_bytes() == node.now, folder / name

        tree(self.base, 0)

    def _take(self, folder: Path, number: int) -> None:
        for entry in sorted(folder.iterdir()):
            child = self._new()
            self._note(
                Event("new", child) if entry.is_dir() else Event("data", child, value=entry.read_bytes())
            )
            self._note(Event("name", number, entry.name, child))
            self._note(Event("fsync", child))
            if entry.is_dir():
                self._take(entry, child)
        self._note(Event("fsync", number))

    # -- what is recorded ----------------------------------------------------------------------------------------

    def _inside(self, path: Any) -> Path | None:
        try:
            return Path(os.fspath(path)).relative_to(self.base)
        except (TypeError, ValueError):
            return None

    def _number(self, path: Path) -> int:
        number = 0
        for part in path.parts:
            number = self._live.folder(number).now()[part]
        return number

    def _note(self, event: Event) -> None:
        self.events.append(event)
        self._live.play([event])

    def _new(self) -> int:
        self._numbers += 1
        return self._numbers

    def _alive(self, *, changes: bool = True) -> None:
        if changes:
            self.calls += 1
            if self.calls == self.die_at:
                self.dead = True
        if self.dead:
            raise Killed

    def _alone(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call so that the disk sees one call at a time."""

        def locked(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                return call(*args, **kwargs)

        return locked

    def _unknown(self, name: str) -> Callable[..., Any]:
        def call(*_: object, **__: object) -> Any:
            raise AssertionError(f"os.{name} is not modelled")

        return call

    def _open(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        inside = self._inside(path)
        if inside is None:
            return int(self._real["open"](path, flags, *args, **kwargs))
        creates = bool(flags & os.O_CREAT) and not os.path.lexists(path)
        assert not flags & (os.O_TRUNC | os.O_APPEND)
        self._alive(changes=creates)
        fd = int(self._real["open"](path, flags, *args, **kwargs))
        if creates:
            number = self._new()
            self._note(Event("data", number, value=b""))
            self._note(Event("name", self._number(inside.parent), inside.name, number))
        self._fds[fd] = self._number(inside)
        return fd

    def _close(self, fd: int) -> None:
        self._fds.pop(fd, None)
        self._real["close"](fd)

    def _put(self, fd: int, at: int, put: int, data: Any) -> None:
        number = self._fds[fd]
        file = self._live.nodes[number]
        assert isinstance(file, _File)
        now = bytearray(file.now).ljust(at, b"\0")
        now[at : at + put] = bytes(memoryview(data).cast("B")[:put])
        self._note(Event("data", number, value=bytes(now)))

    def _write(self, fd: int, data: Any) -> int:
        if fd not in self._fds:
            return int(self._real["write"](fd, data))
        self._alive()
        at = os.lseek(fd, 0, os.SEEK_CUR)
        put = int(self._real["write"](fd, data))
        self._put(fd, at, put, data)
        return put

    def _pwrite(self, fd: int, data: Any, at: int) -> int:
        if fd in self._fds:
            self._alive()
        put = int(self._real["pwrite"](fd, data, at))
        if fd in self._fds:
            self._put(fd, at, put, data)
        return put

    def _ftruncate(self, fd: int, length: int) -> None:
        if fd in self._fds:
            self._alive()
        self._real["ftruncate"](fd, length)
        if fd in self._fds:
            file = self._live.nodes[self._fds[fd]]
            assert isinstance(file, _File)
            self._note(Event("data", self._fds[fd], value=file.now[:length].ljust(length, b"\0")))

    def _fsync(self, fd: int) -> None:
        if fd not in self._fds:
            self._real["fsync"](fd)
            return
        path = Path(os.readlink(f"/proc/self/fd/{fd}")).relative_to(self.base)
        if self.before_fsync is not None and not self.dead:
            self.before_fsync(str(path))
        self._alive()
        is_folder = stat.S_ISDIR(os.fstat(fd).st_mode)
        if is_folder and self.die_synced is not None:
            self.die_synced -= 1
            if self.die_synced <= 0:
                self.dead = True
                raise Killed
        if self.fail_sync is not None:
            self.fail_sync -= 1
            if self.fail_sync <= 0:
                self.fail_sync = None
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        # No power is really lost here, so the real call is left out.
        self._note(Event("fsync", self._fds[fd], site=_site(path, is_folder)))

    def _mkdir(self, path: Any, *args: Any, **kwargs: Any) -> None:
        inside = self._inside(path)
        if inside is None:
            self._real["mkdir"](path, *args, **kwargs)
            return
        self._alive()
        self._real["mkdir"](path, *args, **kwargs)
        number = self._new()
        self._note(Event("new", number))
        self._note(Event("name", self._number(inside.parent), inside.name, number))

    def _link(self, source: Any, target: Any) -> None:
        old, new = self._inside(source), self._inside(target)
        assert old is not None
        assert new is not None
        self._alive()
        self._real["link"](source, target)
        self._note(Event("name", self._number(new.parent), new.name, self._number(old)))

    def _rename(self, source: Any, target: Any) -> None:
        self._replace(source, target)

    def _replace(self, source: Any, target: Any) -> None:
        old, new = self._inside(source), self._inside(target)
        assert old is not None
        assert new is not None
        self._alive()
        self._real["replace"](source, target)
        self._note(Event("name", self._number(new.parent), new.name, self._number(old)))
        self._note(Event("name", self._number(old.parent), old.name, None))

    def _unlink(self, path: Any, *args: Any, **kwargs: Any) -> None:
        inside = self._inside(path)
        if inside is None:
            self._real["unlink"](path, *args, **kwargs)
            return
        self._alive()
        self._real["unlink"](path, *args, **kwargs)
        self._note(Event("name", self._number(inside.parent), inside.name, None))

    _remove = _unlink


_RECORDED = (
    *("open", "close", "write", "pwrite", "ftruncate", "fsync", "mkdir"),
    *("link", "rename", "replace", "unlink", "remove"),
)


_LOCAL = ("scarctl/store/backends/local.py", "scarctl/store/backends/local_files.py")


def _site(path: Path, is_folder: bool) -> str:
    """Return the functions that lead to this fsync, from the store's blob layer, and the kind of file or folder."""
    names: list[str] = []
    frame = sys._getframe(2)
    # Functions above another fsync belong to the process next to which this one works.
    while frame is not None and frame.f_code.co_name != "_fsync":
        if frame.f_code.co_filename.endswith(_LOCAL):
            names.append(frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    names = [name for name in names if name not in ("_temporary", "sync_folder")]
    parts = (path if is_folder else path.parent).parts
    kind = "/".join("N" if part[:1].isdigit() else part for part in parts)
    return f"{' < '.join(names)}: {'folder' if is_folder else 'file in'} {kind or '.'}"
