"""`python -m scarctl.daemon FOLDER`: start the host's daemon, detached. Ends when the daemon accepts connections."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import sys
from pathlib import Path

from scarctl.daemon.folder import make_private_level
from scarctl.daemon.server import Daemon
from scarctl.errors import ScarError

LOCK = "daemon.lock"
LOG = "daemon.log"
_MAX_LOG = 1 << 20
_NICENESS = 10


def main(folder: Path) -> int:
    """Become the daemon of `folder`, unless there is one. The parent returns once the socket is bound."""
    make_private_level(folder)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0  # there is one
    daemon = Daemon(folder)
    if os.fork():
        os._exit(0)  # the caller sees its child end; the daemon is nobody's child
    os.setsid()
    _let_go(folder)
    daemon.serve()
    # Threads of peers that are still connected must not hold up the end.
    logging.shutdown()
    os._exit(0)


def _let_go(folder: Path) -> None:
    """Keep nothing of the process that happened to start the daemon: streams, folder, signals."""
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the terminal's processes; SIGTERM ends it
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    path = folder / LOG
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > _MAX_LOG:
            path.unlink()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    logging.basicConfig(
        stream=os.fdopen(fd, "w", buffering=1),
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
    )
    logging.getLogger("scarctl").info("daemon %d starts", os.getpid())


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1])))
    except (ScarError, OSError) as error:
        print(error, file=sys.stderr)  # noqa: T201
        sys.exit(1)
