"""Keep a store's files in a local folder, durable by fsync, each created exclusively."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from scarctl.errors import MissingGuarantee, NoStore, ScarError
from scarctl.store.backends.base import Buffer, InDoubt
from scarctl.store.backends.local_files import (
    LocalReader,
    LocalWriter,
    create,
    make_folder,
    os_error,
    real,
    sync_folder,
)
from scarctl.store.backends.parallel import Helpers, no_bytes
from scarctl.store.format import SETTINGS, TEMPORARY, check_name, corrupt

T = TypeVar("T")
R = TypeVar("R")

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
# More than four threads read no faster than memory is written.
_HELPERS = Helpers(max(1, min(4, os.cpu_count() or 1) - 1), patient=True)


class LocalBlobs:
    """Files in a local folder, made durable with fsync. Errors name the full path."""

    gap = 16 << 10
    # The allocator reuses memory of this size. Larger pieces would come from the system each time.
    batch = 4 << 20
    exclusive = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self._root = str(root)
        self._mode: int | None = None

    def why_not_exclusive(self) -> str | None:
        return None  # a link fails if its name is taken

    def where(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _path(self, name: str) -> str:
        """Return the path of a file. Raise Corruption if a parent is a symbolic link: it leads out of the store."""
        # Text, because a commit has many paths, and making `Path` objects would take a tenth of its time.
        check_name(name)
        path = self._root
        *folders, last = name.split("/")
        for folder in folders:
            path = real(f"{path}/{folder}")
        return f"{path}/{last}"

    # reading

    def has(self, name: str) -> bool:
        path = self._path(name)
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            # A failing disk must not look like absence: a writer whose files are absent gives up permanently.
            raise os_error(error, path, "look for") from error
        return True

    def top(self) -> list[str]:
        try:
            return os.listdir(self.root)
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise NoStore(
                f"{self.root}: this is a file, not a store's folder",
                hint="give a folder",
                kind="foreign-store",
            ) from None
        except OSError as error:
            raise os_error(error, self.root, "list") from error

    @contextmanager
    def reader(self, name: str) -> Iterator[LocalReader]:
        path = self._path(name)
        try:
            # O_NONBLOCK: opening a FIFO must not wait for its other end.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "no such file", path) from None
        except OSError as error:
            raise os_error(error, path, "open") from error
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise corrupt(path, "a regular file is expected")
            yield LocalReader(fd, path, info.st_size)
        finally:
            os.close(fd)

    def read(self, name: str, limit: int) -> bytes:
        with self.reader(name) as file:
            if file.size > limit:
                raise corrupt(self._path(name), f"it has {file.size} bytes, more than the limit of {limit}")
            return file.read(0, file.size)

    def files(self, folder: str) -> list[tuple[str, int]]:
        # Other files than regular ones stay in the list: opening them raises an error that names them.
        found = []
        for entry in self._scan(folder):
            if entry.is_dir(follow_symlinks=False) or entry.name.startswith(TEMPORARY):
                continue
            try:
                found.append((entry.name, entry.stat(follow_symlinks=False).st_size))
            except FileNotFoundError:
                continue  # deleted since the folder was read
        return sorted(found)

    def names(self, folder: str) -> list[str]:
        # The listing has the kinds of entries, so that no file is accessed.
        return [
            entry.name
            for entry in self._scan(folder)
            if not entry.name.startswith(TEMPORARY) and not entry.is_dir(follow_symlinks=False)
        ]

    def marks(self, folder: str) -> list[tuple[str, str]]:
        found = []
        for name in self.names(folder):
            with contextlib.suppress(FileNotFoundError):  # deleted since the folder was read
                status = os.lstat(self._path(f"{folder}/{name}"))
                found.append((name, f"{status.st_ino}.{status.st_mtime_ns}.{status.st_size}"))
        return sorted(found)

    def folders(self, folder: str) -> list[str]:
        # Symbolic links stay in the list: opening them raises an error that names them.
        return sorted(
            entry.name
            for entry in self._scan(folder)
            if entry.is_symlink() or entry.is_dir(follow_symlinks=False)
        )

    def _scan(self, folder: str) -> list[os.DirEntry[str]]:
        path = real(self._path(folder))
        try:
            with os.scandir(path) as entries:
                return list(entries)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise os_error(error, path, "list") from error

    def each(
        self, work: Callable[[T], R], items: Iterable[T], size: Callable[[T], int] = no_bytes
    ) -> Iterator[R]:
        # Large results are verified during the next read. For small ones a thread would cost more than it saves.
        return map(work, items) if size is no_bytes else _HELPERS.each(work, items, size)

    # writing

    @contextmanager
    def writer(self, name: str) -> Iterator[LocalWriter]:
        path = self._path(name)
        file = LocalWriter(create(path, self._file_mode()), path)
        try:
            yield file
        finally:
            file.close()

    def create_exclusive(self, name: str, parts: Sequence[Buffer]) -> None:
        path = self._path(name)
        with self._temporary(path, parts) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                raise FileExistsError(errno.EEXIST, "already exists", path) from None
            except OSError as error:
                if error.errno in _NO_LINKS:
                    raise MissingGuarantee(
                        f"{os.path.dirname(path)}: this file system cannot create files exclusively ({error.strerror})",
                        hint="put the store on a file system with hard links",
                    ) from error
                raise os_error(error, path, "create") from error
            self._sync_visible(path)

    def replace(self, name: str, data: bytes) -> None:
        path = self._path(name)
        with self._temporary(path, [data]) as temporary:
            try:
                os.replace(temporary, path)
            except OSError as error:
                raise os_error(error, path, "replace") from error

    def settle(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        try:
            found = self.read(name, len(data))
        except FileNotFoundError:
            return False
        if found != data:
            raise FileExistsError(errno.EEXIST, "already exists", path)
        # A new file with a new entry: after a failed sync, syncing again would prove nothing.
        with self._temporary(path, [data]) as temporary:
            try:
                os.replace(temporary, path)
            except OSError as error:
                raise InDoubt(str(os_error(error, path, "replace"))) from error
            self._sync_visible(path)
        return True

    def delete(self, name: str) -> None:
        path = self._path(name)
        try:
            os.unlink(path)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise os_error(error, path, "delete") from error

    def uploads(self) -> list[tuple[str, str]]:
        return []  # a file that is being written has its name already

    def abort(self, name: str, token: str) -> None:
        """Do nothing, because a local store has no uploads."""

    def prepare(self, folder: str, *, known: bool = False) -> None:
        path = Path(real(self._path(folder)))
        there = path.is_dir()
        if there and known:
            return
        if not there:
            # The store's settings file is synced first: without it, the rest would not be a store after a power loss.
            sync_folder(self.root)
            make_folder(path, stat.S_IMODE(os.stat(self.root).st_mode))
        # Existing folders are synced, too: the process that made one may have died before it became durable.
        while True:
            sync_folder(path)
            if path == self.root:
                return
            path = path.parent

    def begin(self) -> None:
        for path in (self.root, *self.root.parents):
            if path.is_symlink() and not path.exists():
                raise NoStore(
                    f"{path}: this symbolic link leads to nothing",
                    hint="make the folder to which it leads, or give another one",
                )
        make_folder(self.root)
        sync_folder(self.root.parent)
        # Parents may be new, too, or of a process that died before they were durable. Some may not be readable.
        for folder in self.root.parent.parents:
            with contextlib.suppress(ScarError):
                sync_folder(folder)

    def hurry(self) -> None:
        """Do nothing: waiting for a local disk cannot be interrupted."""

    def close(self) -> None:
        """Do nothing, because no file stays open."""

    def _file_mode(self) -> int:
        """Return the mode of the store's first file, because a daemon may have another umask than its creator."""
        if self._mode is None:
            try:
                self._mode = stat.S_IMODE(os.stat(self.root / SETTINGS).st_mode) & 0o666
            except OSError:
                return 0o666  # another process is creating it
        return self._mode

    @contextmanager
    def _temporary(self, path: str, parts: Sequence[Buffer]) -> Iterator[str]:
        temporary = f"{os.path.dirname(path)}/{TEMPORARY}{uuid.uuid4().hex}"
        file = LocalWriter(create(temporary, self._file_mode()), temporary)
        try:
            for part in parts:
                file.write(part)
            file.commit(entry=False)
        finally:
            file.close()
        try:
            yield temporary
        finally:
            # A failure is harmless: every reader skips a remaining temporary, and the outcome is known.
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    def _sync_visible(self, path: str) -> None:
        try:
            sync_folder(os.path.dirname(path))
        except ScarError as error:
            raise InDoubt(
                f"{path}: written, but it is not known whether it is durable ({error.message})",
                hint="acknowledged commits are safe; the next commit settles this one",
            ) from error
