"""Read, write and sync single files and folders with system calls; every failure is an error of scarctl."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from pathlib import Path

from scarctl.errors import AccessDenied, ScarError, Unavailable
from scarctl.store.backends.base import Buffer, RangeReader, as_bytes
from scarctl.store.format import corrupt

WRITEBACK = 8 << 20  # bytes after which a writer asks the system to begin writing them out
HELD = 256 << 10  # bytes of small parts that are written together
READ = 512 << 10  # bytes of one read: with larger ones, read-ahead would overlap the reads of another thread

_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_FULL = (errno.ENOSPC, errno.EDQUOT)


def os_error(error: OSError, path: object, doing: str) -> ScarError:
    """Return the scarctl error for a failed system call on `path`."""
    reason = f"{path}: cannot {doing}: {error.strerror or error}"
    if error.errno in _DENIED:
        return AccessDenied(
            reason, hint="check the owner, the permissions and whether it is mounted read-only"
        )
    if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO):
        return corrupt(path, f"a regular file is expected ({error.strerror})")
    if error.errno in _FULL:
        return Unavailable(
            reason, hint="free some space and try again; acknowledged commits are safe", kind="store-full"
        )
    return Unavailable(reason, hint="check the disk and try again; acknowledged commits are safe")


class LocalReader(RangeReader):
    def __init__(self, fd: int, path: str, size: int) -> None:
        super().__init__(path, size)
        self._fd = fd

    def read_into(self, start: int, buffer: memoryview) -> None:
        self.check(start, start + len(buffer))
        done = 0
        while done < len(buffer):
            try:
                got = os.preadv(self._fd, [buffer[done : done + READ]], start + done)
            except OSError as error:
                raise os_error(error, self._where, "read") from error
            if got == 0:
                raise corrupt(self._where, f"it ends at byte {start + done}")
            done += got


class LocalWriter:
    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._path = path
        self._length = 0
        self._held = bytearray()
        self._started = 0
        self._committed = False

    def write(self, buffer: Buffer) -> None:
        view = as_bytes(buffer)
        self._length += len(view)
        if len(view) < HELD:
            # One system call for many small parts. The caller may change them at once.
            self._held += view
            if len(self._held) < HELD:
                return
            view = memoryview(b"")
        self._flush()
        self._put(view)
        if self._length - self._started >= WRITEBACK:
            self._start_writeback()

    def _flush(self) -> None:
        """Write what is held."""
        held, self._held = self._held, bytearray()
        self._put(memoryview(held))

    def _put(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            try:
                put = os.write(self._fd, view[done:])
            except OSError as error:
                raise os_error(error, self._path, "write") from error
            done += put

    def _start_writeback(self) -> None:
        # On Linux this advice starts writing dirty pages without waiting: the disk works during hashing.
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # the advice is optional
                os.posix_fadvise(
                    self._fd, self._started, self._length - self._started, os.POSIX_FADV_DONTNEED
                )
        self._started = self._length

    def commit(self, *, entry: bool = True) -> None:
        """Make the content durable, and with `entry` also the name."""
        self._flush()
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
            sync_folder(os.path.dirname(self._path))
        self._committed = True

    def close(self) -> None:
        """Close the file and delete it unless it was committed."""
        fd, self._fd = self._fd, -1
        # An error of close after a successful fsync does not affect the data. Without commit the file is deleted.
        with contextlib.suppress(OSError):
            os.close(fd)
        if not self._committed:
            # A failure leaves an orphan that no record names, which is harmless.
            with contextlib.suppress(OSError):
                os.unlink(self._path)


def real(folder: str) -> str:
    """Return the folder. Raise Corruption if it is a symbolic link, which would lead out of the store."""
    if os.path.islink(folder):
        raise corrupt(folder, "a folder is expected, but it is a symbolic link")
    return folder


def create(path: str, mode: int) -> int:
    """Create a file exclusively and return its descriptor. Raise FileExistsError, Unavailable, AccessDenied."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags, mode)
    except FileExistsError:
        raise FileExistsError(errno.EEXIST, "already exists", path) from None
    except FileNotFoundError as error:
        # The folder is not created again: a record in a new folder would lack the earlier records.
        raise Unavailable(
            f"{os.path.dirname(path)}: the folder is gone",
            hint="the store was deleted, moved or unmounted; saving continues when the folder is back",
        ) from error
    except OSError as error:
        raise os_error(error, path, "create") from error


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Create a folder and its missing parents, if absent. The caller makes their names durable."""
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


def sync_folder(path: str | Path) -> None:
    """Make the names in a folder durable."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise os_error(error, path, "sync the folder") from error
