"""Start the host's daemon, detached: `python -m scarctl.daemon FOLDER`. Returns when it accepts connections."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import stat
import sys
from pathlib import Path
from typing import TextIO

from scarctl.arena.folder import folder_error, make_private_level
from scarctl.daemon.crowd import raise_limit
from scarctl.daemon.server import Daemon
from scarctl.errors import AccessDenied, ScarError

LOCK = "daemon.lock"
LOG = "daemon.log"
_MAX_LOG = 1 << 20
_OTHERS_MAY_NOT_WRITE = 0o022


def main(folder: Path) -> int:
    """Become the daemon of `folder`, unless one is running. The parent returns once the socket is bound.

    Raises AccessDenied if the folder, or a file in it, belongs to another user; Unavailable.
    """
    make_private_level(folder)
    lock = _open(folder / LOCK, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0  # another daemon is running
    # Everything that can fail is done before the fork, while the caller can still report it.
    log = _open_log(folder / LOG)
    daemon = Daemon(folder)
    if os.fork():
        os._exit(0)  # the caller's child ends, and init adopts the daemon
    _detach(daemon)
    logging.basicConfig(stream=log, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logger = logging.getLogger("scarctl")
    logger.info("daemon %d starts", os.getpid())
    try:
        daemon.serve(alone=True)
        logger.info("daemon %d ends", os.getpid())
    except BaseException:
        logger.exception("daemon %d fails", os.getpid())
    logging.shutdown()
    # Threads of connected peers must not delay the end.
    os._exit(0)


def _detach(daemon: Daemon) -> None:
    """Detach from the process that started the daemon: its session, working directory, streams and signals."""
    os.setsid()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # these are meant for the terminal's processes
    signal.signal(signal.SIGTERM, lambda *_: daemon.terminate())
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # The inherited umask may allow writing by all users. Stricter modes of a store's folder still apply.
    os.umask(_OTHERS_MAY_NOT_WRITE)
    raise_limit()


def _open(path: Path, flags: int) -> int:
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise folder_error(error, path) from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(fd)
        raise AccessDenied(
            f"{path} is not a private file of this user", hint="another user may have created it: remove it"
        )
    return fd


def _open_log(path: Path) -> TextIO:
    """Open the log for appending. If it has grown large, begin a new one."""
    with contextlib.suppress(FileNotFoundError):
        if path.lstat().st_size > _MAX_LOG:
            path.unlink()
    return os.fdopen(_open(path, os.O_WRONLY | os.O_APPEND), "w", buffering=1)


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1])))
    except (ScarError, OSError) as error:
        print(error, file=sys.stderr)  # noqa: T201
        sys.exit(1)
