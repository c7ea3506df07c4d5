"""Files of a store in a local folder, durable by fsync: the only code of the store that touches a file system."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from scarctl.errors import AccessDenied, MissingGuarantee, NoStore, ScarError, Unavailable
from scarctl.store.atonce import Helpers, no_bytes
from scarctl.store.blob import Buffer, InDoubt, as_bytes
from scarctl.store.format import SETTINGS, TEMPORARY, check_name, corrupt

T = TypeVar("T")
R = TypeVar("R")

WRITEBACK = 8 << 20  # bytes after which a writer asks the system to begin writing them out
READ = 512 << 10  # bytes of one read: for larger ones the system reads ahead into what another thread reads

_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def os_error(error: OSError, path: object, doing: str) -> ScarError:
    """The scarctl error for a failed system call on `path`."""
    reason = f"{path}: cannot {doing}: {error.strerror or error}"
    if error.errno in _DENIED:
        return AccessDenied(
            reason, hint="check the owner, the permissions and whether it is mounted read-only"
        )
    if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO):
        return corrupt(path, f"a regular file is expected ({error.strerror})")
    if error.errno in _FULL:
        return Unavailable(
            reason, hint="free some space and try again; what was acknowledged is safe", kind="store-full"
        )
    return Unavailable(reason, hint="check the disk and try again; what was acknowledged is safe")


_HELPERS = Helpers(1)
_SYNCING = Helpers()


class LocalBlobs:
    """Files in a local folder, made durable with fsync. Errors name the full path."""

    gap = 16 << 10
    # The allocator keeps memory of this size; each larger piece it would get from the system anew.
    batch = 4 << 20
    exclusive = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self._mode: int | None = None

    def why_not_exclusive(self) -> str | None:
        return None  # a link fails if its name is taken

    def where(self, name: str) -> str:
        return str(self.root / name)

    def _path(self, name: str) -> Path:
        """Raises Corruption when a folder above is a symbolic link: files elsewhere are no part of the store."""
        check_name(name)
        path = self.root
        *folders, last = name.split("/")
        for folder in folders:
            path = _real(path / folder)
        return path / last

    # reading

    def has(self, name: str) -> bool:
        path = self._path(name)
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            # A disk that does not answer is no absent file: writers give up for good when others have collected theirs.
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
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path)) from None
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
        # What is not a regular file stays in the list: opening it gives the error that names it.
        found = []
        for entry in self._scan(folder):
            if entry.is_dir(follow_symlinks=False) or entry.name.startswith(TEMPORARY):
                continue
            try:
                found.append((entry.name, entry.stat(follow_symlinks=False).st_size))
            except FileNotFoundError:
                continue  # deleted since the folder was read: that says nothing about the others
        return sorted(found)

    def names(self, folder: str) -> list[str]:
        # The entry's kind comes with the listing: no file is asked for anything.
        return [
            entry.name
            for entry in self._scan(folder)
            if not entry.name.startswith(TEMPORARY) and not entry.is_dir(follow_symlinks=False)
        ]

    def folders(self, folder: str) -> list[str]:
        # A link stays in the list, wherever it leads: going into it gives the error that names it.
        return sorted(
            entry.name
            for entry in self._scan(folder)
            if entry.is_symlink() or entry.is_dir(follow_symlinks=False)
        )

    def _scan(self, folder: str) -> list[os.DirEntry[str]]:
        path = _real(self._path(folder))
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
        # What is read in bulk is checked beside the next read. Small things take less than a thread does.
        return map(work, items) if size is no_bytes else _HELPERS.each(work, items, size)

    # writing

    def write_each(
        self, work: Callable[[T], R], items: Iterable[T], size: Callable[[T], int] = no_bytes
    ) -> Iterator[R]:
        # A journal makes durable in one turn what several wait for.
        return _SYNCING.each(work, items, size)

    @contextmanager
    def writer(self, name: str) -> Iterator[LocalWriter]:
        path = self._path(name)
        file = LocalWriter(_create(path, self._file_mode()), path)
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
                raise FileExistsError(errno.EEXIST, "exists already", str(path)) from None
            except OSError as error:
                if error.errno in _NO_LINKS:
                    raise MissingGuarantee(
                        f"{path.parent}: this file system cannot create files exclusively ({error.strerror})",
                        hint="put the store on a file system with hard links",
                    ) from error
                raise os_error(error, path, "create") from error
            self._sync_visible(path)

    def settle(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        try:
            found = self.read(name, len(data))
        except FileNotFoundError:
            return False
        if found != data:
            raise FileExistsError(errno.EEXIST, "exists already", str(path))
        # A new file and a new entry: what failed to become durable before is not synced twice.
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
        """There is nothing to abort."""

    def prepare(self, folder: str, *, known: bool = False) -> None:
        path = _real(self._path(folder))
        there = path.is_dir()
        if there and known:
            return
        if not there:
            # Not beside a name of the store's own that a power loss may still take: what is left would be no store.
            sync_folder(self.root)
            make_folder(path, stat.S_IMODE(os.stat(self.root).st_mode))
        # Also for a folder that exists: whoever made it may have died before it became durable.
        while True:
            sync_folder(path)
            if path == self.root:
                return
            path = path.parent

    def begin(self) -> None:
        make_folder(self.root)
        sync_folder(self.root.parent)
        # Those above may be new too, or of one who died before they were durable. Not all need be ours to read.
        for folder in self.root.parent.parents:
            with contextlib.suppress(ScarError):
                sync_folder(folder)

    def hurry(self) -> None:
        """A disk answers, or nobody can help it."""

    def close(self) -> None:
        """Nothing is held open."""

    def _file_mode(self) -> int:
        """Who may read what: as the store's first file, which its creator made. A daemon writes for several."""
        if self._mode is None:
            try:
                self._mode = stat.S_IMODE(os.stat(self.root / SETTINGS).st_mode) & 0o666
            except OSError:
                return 0o666  # it is being created
        return self._mode

    @contextmanager
    def _temporary(self, path: Path, parts: Sequence[Buffer]) -> Iterator[Path]:
        temporary = path.parent / f"{TEMPORARY}{uuid.uuid4().hex}"
        file = LocalWriter(_create(temporary, self._file_mode()), temporary)
        try:
            for part in parts:
                file.write(part)
            file.commit(entry=False)
        finally:
            file.close()
        try:
            yield temporary
        finally:
            # Best effort: a temporary that stays is skipped by every reader, and the outcome is known.
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    def _sync_visible(self, path: Path) -> None:
        try:
            sync_folder(path.parent)
        except ScarError as error:
            raise InDoubt(
                f"{path}: written, but it is not known whether it is durable ({error.message})",
                hint="what was acknowledged is safe; the next commit settles this one",
            ) from error


class LocalReader:
    def __init__(self, fd: int, path: Path, size: int) -> None:
        self._fd = fd
        self._path = path
        self.size = size

    def read(self, start: int, stop: int) -> bytes:
        # Checked first, so that a wrong offset from a damaged file allocates nothing.
        self._check(start, stop)
        data = bytearray(stop - start)
        self.read_into(start, memoryview(data))
        return bytes(data)

    def read_into(self, start: int, buffer: memoryview) -> None:
        self._check(start, start + len(buffer))
        done = 0
        while done < len(buffer):
            try:
                got = os.preadv(self._fd, [buffer[done : done + READ]], start + done)
            except OSError as error:
                raise os_error(error, self._path, "read") from error
            if got == 0:
                raise corrupt(self._path, f"it ends at byte {start + done}")
            done += got

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        for start, buffer in ranges:
            self.read_into(start, buffer)

    def _check(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.size:
            raise corrupt(self._path, f"bytes {start}..{stop} are wanted, it has {self.size}")


class LocalWriter:
    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self._path = path
        self._length = 0
        self._started = 0
        self._committed = False

    def write(self, buffer: Buffer) -> None:
        view = as_bytes(buffer)
        done = 0
        while done < len(view):
            try:
                put = os.write(self._fd, view[done:])
            except OSError as error:
                raise os_error(error, self._path, "write") from error
            done += put
        self._length += done
        if self._length - self._started >= WRITEBACK:
            self._start_writeback()

    def _start_writeback(self) -> None:
        # On Linux this advice starts writing dirty pages out and waits for nothing: the disk works while we
        # hash.
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # advice only
                os.posix_fadvise(
                    self._fd, self._started, self._length - self._started, os.POSIX_FADV_DONTNEED
                )
        self._started = self._length

    def commit(self, *, entry: bool = True) -> None:
        """Makes the content durable and, with `entry`, the name too."""
        try:
            os.fsync(self._fd)
            length = os.fstat(self._fd).st_size
        except OSError as error:
            raise os_error(error, self._path, "sync") from error
        if length != self._length:
            raise Unavailable(
                f"{self._path}: {length} bytes after writing {self._length}", hint="check the disk"
            )
        if entry:
            sync_folder(self._path.parent)
        self._committed = True

    def close(self) -> None:
        """Closes the file and deletes it unless it was committed."""
        fd, self._fd = self._fd, -1
        # An error of close after a successful fsync says nothing about the data; without commit the file goes
        # anyway.
        with contextlib.suppress(OSError):
            os.close(fd)
        if not self._committed:
            # Best effort: what stays is an orphan that no record names.
            with contextlib.suppress(OSError):
                os.unlink(self._path)


def _real(folder: Path) -> Path:
    if os.path.islink(folder):
        raise corrupt(folder, "a folder is expected, it is a symbolic link")
    return folder


def _create(path: Path, mode: int) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags, mode)
    except FileExistsError:
        raise FileExistsError(errno.EEXIST, "exists already", str(path)) from None
    except FileNotFoundError as error:
        # Not to be made again: a record in a new folder would lack those before it.
        raise Unavailable(
            f"{path.parent}: the folder is gone",
            hint="something has deleted, moved or unmounted the store; it goes on when the folder is there again",
        ) from error
    except OSError as error:
        raise os_error(error, path, "create") from error


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Makes a folder and its missing parents; existing ones are fine. The caller makes their names durable."""
    if path.is_dir():
        return
    make_folder(path.parent, mode)
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        if not path.is_dir():
            raise corrupt(path, "a folder is expected") from None
    except OSError as error:
        raise os_error(error, path, "make the folder") from error


def sync_folder(path: Path) -> None:
    """Makes the names in a folder durable."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise os_error(error, path, "sync the folder") from error
