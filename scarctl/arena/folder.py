"""Find and lock the private folder of one run's arena.

    <base>/scarctl-<uid>/<run id>/

A run's id is that of its store. If several ranks save to the store, the number of the shard follows.

Other users can neither read the folder nor replace it: both levels belong to this user, have mode 0700, and are not
symbolic links.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shlex
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from scarctl.arena.header import SITE, TOLD
from scarctl.errors import AccessDenied, Contention, ScarError, Unavailable

if TYPE_CHECKING:
    from scarctl.store import Store

log = logging.getLogger("scarctl")

LOCK_SECONDS = 1.0
"""Seconds to wait for a folder's lock: a search for arenas of dead runs holds it for a moment."""
_PAUSE = 0.01
_SHARED_MEMORY = Path("/dev/shm")
_ZEROS = bytes(1 << 20)


def arena_folder(base: str | None, run_id: str) -> Path:
    """Return the folder of a run's arena. Creates nothing. `base` as for `host_folder`."""
    return host_folder(base) / run_id


def host_folder(base: str | None) -> Path:
    """Return the folder of this user's arenas and of the daemon's socket. Creates nothing.

    base: None means shared memory. On a host without it, the temp directory is used, with a warning: it may be on disk.
    """
    if base is not None:
        root = Path(base).absolute()
    elif sys.platform == "linux" and _SHARED_MEMORY.is_dir():
        root = _SHARED_MEMORY
    else:
        root = Path(tempfile.gettempdir())
        warnings.warn(
            f"no shared memory on this host: the arena is in {root}, which may be slower", stacklevel=3
        )
    return root / f"scarctl-{os.getuid()}"


def private(path: str, flags: int) -> int:
    """Open a file that only this user may read, and that is not a symbolic link: an opener for `open`."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def no_links(path: str, flags: int) -> int:
    """Open an existing file that is not a symbolic link, without waiting for a pipe's writer: an opener for `open`."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)


def make_private(folder: Path) -> None:
    """Create the arena's folder and its parent, or check that both belong to this user and are private.

    Raises AccessDenied if another user created one of them; Unavailable if it cannot be created.
    """
    for level in (folder.parent, folder):
        make_private_level(level)


def make_private_level(folder: Path) -> None:
    """Create one folder, or check that it belongs to this user and is private. Raises as `make_private` does."""
    while True:
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            pass
        except FileNotFoundError as error:
            raise _missing(folder.parent) from error
        except OSError as error:
            raise folder_error(error, folder) from error
        try:
            return check_private(folder)
        except ScarError as error:
            # A process that removes empty folders may have removed it meanwhile.
            if not isinstance(error.__cause__, FileNotFoundError):
                raise


def check_private(folder: Path) -> None:
    """Raise AccessDenied unless `folder` is a real directory of this user that no other user can enter."""
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
            f"{folder} is not a folder of this user with mode 0700",
            hint="another user may have created it: remove it, or set another arena_dir",
        )


def check_both(folder: Path) -> None:
    """Apply `check_private` to an arena's folder and its parent, if they exist. Creates nothing."""
    for level in (folder.parent, folder):
        if os.path.lexists(level):
            check_private(level)


def lock_folder(folder: Path, *, patience: float = LOCK_SECONDS) -> int:
    """Create the arena's folder if necessary, and lock it: the lock lasts until the returned descriptor is closed.

    Raises as `make_private` does; Contention if a live process holds the lock for more than `patience` seconds.
    """
    deadline = time.monotonic() + patience
    while True:
        make_private(folder)
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # the folder's last owner has just removed it
        except OSError as error:
            raise folder_error(error, folder) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # If the folder was removed before it was locked, this lock protects nothing, even if a third process has
            # created the folder again.
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
    """Raise Unavailable (`kind` "arena-full") unless `folder` has an arena, or room for one of at least `nbytes`.

    Reserves no space: the folder may be full when the arena is created. Raises Unavailable if the place does not exist.
    """
    base = folder.parents[1]
    if not base.is_dir():
        raise _missing(base)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if existing != folder and _free_bytes(existing) < nbytes:
        raise _no_room(existing, nbytes, least=True)


def require_free(folder: Path, nbytes: int) -> None:
    """Raise Unavailable (`kind` "arena-full") unless so many bytes are free in an existing folder. Reserves nothing."""
    if _free_bytes(folder) < nbytes:
        raise _no_room(folder, nbytes)


def reserve(fd: int, size: int, folder: Path, gap: tuple[int, int] | None = None) -> None:
    """Reserve the space: if a tmpfs is full when a page is touched, SIGBUS kills the process.

    gap: begin and end of bytes that must have room now, and get none yet: reserve again before they are mapped.

    Raises Unavailable (`kind` "arena-full").
    """
    try:
        if gap is not None:
            require_free(folder, size)
            os.ftruncate(fd, size)
        for at, end in ((0, size),) if gap is None else ((0, gap[0]), (gap[1], size)):
            if at == end:
                continue  # which the system refuses to reserve
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, at, end - at)
            else:
                for first in range(at, end, len(_ZEROS)):
                    os.pwrite(fd, _ZEROS[: end - first], first)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
            raise
        raise _no_room(folder, size) from error


def _missing(base: Path) -> Unavailable:
    """Return the error for an arena_dir that does not exist. It is not created: perhaps its disk is not mounted."""
    return Unavailable(
        f"{base}: {os.strerror(errno.ENOENT)}",
        hint=f"create it (mkdir -p {shlex.quote(str(base))}), mount its disk, or set another arena_dir "
        "(SCARCTL_ARENA_DIR)",
    )


def _no_room(folder: Path, nbytes: int, *, least: bool = False) -> Unavailable:
    """Return the error for an arena that does not fit."""
    return Unavailable(
        f"the arena needs {'at least ' if least else ''}{nbytes:,} bytes in {folder}, {_free_bytes(folder):,} are free",
        hint="set arena_dir (SCARCTL_ARENA_DIR) to a folder with room, even on disk, or enlarge /dev/shm",
        kind="arena-full",
    )


def _free_bytes(folder: Path) -> int:
    """Return the bytes that this user can still write to the folder's file system."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Delete these files, in this order, and the folder if it is empty then. Raises Unavailable, AccessDenied."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
    try:
        os.rmdir(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise folder_error(error, folder) from error


def note_site(folder: Path, store: Store) -> None:
    """Note where the folder of an open store is, next to the arena in `folder`. Failures are logged, never raised."""
    if store.address.root is None:
        return
    place = os.path.realpath(store.address.root)
    try:
        marks = [mark(path) for path in (Path(place), *Path(place).parents)]
        (folder / TOLD).unlink(missing_ok=True)
        with open(folder / f".{SITE}-new", "w", encoding="utf-8", opener=private) as file:
            json.dump({"path": place, "marks": marks}, file)
        os.replace(folder / f".{SITE}-new", folder / SITE)
    except (OSError, UnicodeError) as error:
        log.warning("%s: where it is cannot be noted: %s", store.url, error)


def mark(path: Path) -> list[int]:
    """Return device and inode of a file. Raises OSError."""
    status = os.stat(path)
    return [status.st_dev, status.st_ino]


def folder_error(error: OSError, path: Path) -> ScarError:
    """Return the scarctl error for a failed system call on something in the arena's folder.

    Its `kind` is "arena-full" if there was no room.
    """
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return AccessDenied(f"{path}: {error.strerror}", hint="set an arena_dir that you can write to")
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return Unavailable(
        f"{path}: {error.strerror or error}",
        hint="set another arena_dir, or free some space",
        kind="arena-full" if full else None,
    )
