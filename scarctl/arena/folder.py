"""Find and lock the private folder of one run's arena.

    <base>/scarctl-<uid>/<run id>/

A run's id is that of its store, or where several ranks save to one store, that and the number of this one's shard.

Other users can neither read it nor put something in its place: both levels are ours, mode 0700, and no symbolic links.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
import tempfile
import time
import warnings
from pathlib import Path

from scarctl.errors import AccessDenied, Contention, ScarError, Unavailable

LOCK_SECONDS = 1.0
"""A search for arenas of dead runs holds a folder's lock for a moment: an owner to be waits that long."""
_PAUSE = 0.01
_SHARED_MEMORY = Path("/dev/shm")
_ZEROS = bytes(1 << 20)


def arena_folder(base: str | None, run_id: str) -> Path:
    """Return where the arena of the run that saves to this store lies. Creates nothing. `base` as for `host_folder`."""
    return host_folder(base) / run_id


def host_folder(base: str | None) -> Path:
    """Return where this user's arenas and the daemon's socket lie. Creates nothing.

    base: None means shared memory; where there is none, the temp directory (which may be on a disk: a warning says so).
    """
    if base is not None:
        root = Path(base).absolute()
    elif sys.platform == "linux" and _SHARED_MEMORY.is_dir():
        root = _SHARED_MEMORY
    else:
        root = Path(tempfile.gettempdir())
        warnings.warn(f"no shared memory here: the arena goes to {root}, which may be slower", stacklevel=3)
    return root / f"scarctl-{os.getuid()}"


def make_private(folder: Path) -> None:
    """Create the arena's folder and the one above it, or check that they are ours alone.

    Raises AccessDenied when another user made one of them; Unavailable when it cannot be made.
    """
    for level in (folder.parent, folder):
        make_private_level(level)


def make_private_level(folder: Path) -> None:
    """Create one folder, or check that it is ours alone. Raises what `make_private` raises."""
    while True:
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            pass
        except OSError as error:
            raise folder_error(error, folder) from error
        try:
            return check_private(folder)
        except ScarError as error:
            # Who tidies up may have removed it in between.
            if not isinstance(error.__cause__, FileNotFoundError):
                raise


def check_private(folder: Path) -> None:
    """Raise AccessDenied unless `folder` is a real directory that belongs to this user and nobody else can enter."""
    try:
        status = os.lstat(folder)
    except OSError as error:
        raise folder_error(error, folder) from error
    if (
        not stat.S_ISDIR(status.st_mode)
        or status.st_uid != os.getuid()
        or stat.S_IMODE(status.st_mode) & 0o077
    ):
        raise AccessDenied(
            f"{folder} is not a folder of yours with mode 0700",
            hint="another user may have made it: remove it, or give another arena_dir",
        )


def check_both(folder: Path) -> None:
    """`check_private` for an arena's folder and the one above it, where there are such. Creates nothing."""
    for level in (folder.parent, folder):
        if os.path.lexists(level):
            check_private(level)


def lock_folder(folder: Path, *, patience: float = LOCK_SECONDS) -> int:
    """Make the arena's folder if need be, and lock it: the lock lasts until the descriptor returned is closed.

    Raises what `make_private` raises; Contention when a live process holds the lock for more than `patience` seconds.
    """
    deadline = time.monotonic() + patience
    while True:
        make_private(folder)
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # its last owner removed it just now
        except OSError as error:
            raise folder_error(error, folder) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Removed before it was locked, and perhaps made again by a third process: this is the lock of nothing.
            if os.path.samestat(os.fstat(fd), os.lstat(folder)):
                return fd
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(fd)
            if time.monotonic() < deadline:
                time.sleep(_PAUSE)
                continue
            raise Contention(
                f"the arena in {folder} is in use by a live process",
                hint="stop that run first, or wait until it ends",
            ) from None
        except OSError as error:
            os.close(fd)
            raise folder_error(error, folder) from error
        os.close(fd)


def require_room(folder: Path, nbytes: int) -> None:
    """Raise Unavailable (`kind` "arena-full") unless an arena of at least `nbytes` fits into `folder`, or one is there.

    Takes no space: the folder may still be full when the arena is made. Raises Unavailable when there is no such place.
    """
    base = folder.parents[1]
    if not base.is_dir():
        raise folder_error(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)), base)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if existing != folder and _free_bytes(existing) < nbytes:
        raise _no_room(existing, nbytes, least=True)


def reserve(fd: int, size: int, folder: Path) -> None:
    """Take the space now: a tmpfs that is full when a page is touched kills the process with SIGBUS."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)
        else:
            for at in range(0, size, len(_ZEROS)):
                os.pwrite(fd, _ZEROS[: size - at], at)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
            raise
        raise _no_room(folder, size) from error


def _no_room(folder: Path, nbytes: int, *, least: bool = False) -> Unavailable:
    """Return the error for an arena that does not fit."""
    return Unavailable(
        f"the arena needs {'at least ' if least else ''}{nbytes:,} bytes in {folder}, {_free_bytes(folder):,} are free",
        hint="give arena_dir (SCARCTL_ARENA_DIR) a folder with room, on disk if need be, or enlarge /dev/shm",
        kind="arena-full",
    )


def _free_bytes(folder: Path) -> int:
    """Return the bytes that this user can still write there."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def clear_queue(folder: Path) -> None:
    """Delete all hand-overs in the folder, and what was set aside of them."""
    for path in (*folder.glob("handover-*"), *folder.glob(".handover-*")):
        path.unlink(missing_ok=True)


def folder_error(error: OSError, path: Path) -> ScarError:
    """Return the scarctl error for a failed system call on something in the arena's folder."""
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return AccessDenied(f"{path}: {error.strerror}", hint="give an arena_dir that you can write to")
    return Unavailable(
        f"{path}: {error.strerror or error}", hint="give another arena_dir, or free some space"
    )
