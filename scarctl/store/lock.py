"""Allow one live local writer per store: flock on a file that is never deleted.

The kernel frees the lock when its holder dies, so a crash leaves nothing to clean up. A forked child shares
the open file and would keep the lock beyond its parent's death: it closes its copy right after the fork.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from scarctl.errors import Contention, MissingGuarantee
from scarctl.store.backends.local_files import os_error
from scarctl.store.format import corrupt

_T = TypeVar("_T")
_DAEMON = (
    "it is a daemon, which saves for a run that has ended, here or where this store was before it was moved: "
    "`scarctl daemon status` shows it"
)
_MOMENT = 0.5
"""Seconds for which a writer tries to get the lock."""


def for_a_writer(take: Callable[[], _T]) -> _T:
    """Return `take()`, which is repeated for a moment while it raises Contention.

    `scarctl prune` takes the lock only to find out whether a writer is alive. Its look must not stop a new writer.
    """
    began = time.monotonic()
    while True:
        try:
            return take()
        except Contention:
            if time.monotonic() - began > _MOMENT:
                raise
        time.sleep(0.01)


class StoreLock:
    """Holds `path` locked from construction to `release`. Raises Contention, naming the holder, if it is locked."""

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        """Take the lock. shared: share it with other shared holders, and exclude only exclusive ones."""
        self._fd = -1
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise os_error(error, path, "open the lock file") from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:  # the file is about to be written
                raise corrupt(path, "the lock is not a regular file, or has a second name")
            _lock(fd, path, shared=shared)
            _sign(fd)
        except OSError as error:
            os.close(fd)
            raise os_error(error, path, "lock the store") from error
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        _held.add(self)

    @property
    def held(self) -> bool:
        return self._fd >= 0

    @property
    def deleted(self) -> bool:
        """Whether the file that this holds was deleted: it has no name any more. A store that is moved keeps it."""
        return self._fd >= 0 and os.fstat(self._fd).st_nlink == 0

    def release(self) -> None:
        """Free the lock. Does nothing the second time, or in a forked child."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class NoLock:
    """Replaces the lock at a remote store, where only epochs exclude a second writer."""

    held = True
    deleted = False

    def release(self) -> None:
        """Do nothing: a remote store has no lock."""


class BothLocks:
    """The store's lock, shared with the other ranks of a job, and that of this rank's shard."""

    def __init__(self, store: Path, shard: Path) -> None:
        self._store = StoreLock(store, shared=True)
        try:
            self._shard = StoreLock(shard)
        except BaseException:
            self._store.release()
            raise

    @property
    def held(self) -> bool:
        return self._shard.held

    @property
    def deleted(self) -> bool:
        """See `StoreLock`."""
        return self._store.deleted

    def release(self) -> None:
        """Free both. Does nothing the second time, or in a forked child."""
        self._shard.release()
        self._store.release()


def _lock(fd: int, path: Path, *, shared: bool) -> None:
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        words = os.pread(fd, 200, 0).decode("utf-8", "replace").split()
        holder = f"process {words[0]} on {words[1]}" if len(words) == 2 else "another process"
        raise Contention(
            f"{path.parent}: {holder} is writing to this store",
            hint=_DAEMON if _is_daemon(words) else "wait until it ends, or stop it; reading needs no lock",
        ) from None
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise MissingGuarantee(
                f"{path.parent}: this file system has no file locks",
                hint="put the store on another file system",
            ) from error
        raise


def _is_daemon(words: list[str]) -> bool:
    """Return whether a holder on this host is a daemon, as far as the system says. words: its process id and host."""
    if len(words) != 2 or not words[0].isdecimal() or words[1] != socket.gethostname():
        return False
    try:
        return b"scarctl.daemon" in Path("/proc", words[0], "cmdline").read_bytes()
    except OSError:
        return False


def _sign(fd: int) -> None:
    """Write who holds the lock, for messages. On a full disk that may be missing: deleting takes the lock, too."""
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise


_held: weakref.WeakSet[StoreLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_after_fork)
