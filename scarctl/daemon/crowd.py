"""Accept the daemon's peers, as many as its limit of open files allows.

A session has two connections, and its run some files: the lock, the arena, the segment that is being written.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

from scarctl.daemon import protocol
from scarctl.errors import ScarError, Unavailable

BACKLOG = 4096
"""Connections that wait to be accepted, if the system allows so many."""

MOST_DESCRIPTORS = 1 << 16
"""More are of no use: each session has a few threads, too."""
_PER_SESSION = 6
_SPARE = 64
"""Descriptors for the daemon itself, and for commands that ask something."""
_MOST_SESSIONS = 2048


def raise_limit() -> None:
    """Have as many open files as the system allows this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_sessions() -> int:
    """Sessions that this process can serve."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_SESSIONS
    return max(1, min(_MOST_SESSIONS, (soft - _SPARE) // _PER_SESSION))


def most_connections() -> int:
    """Connections that this process can serve: those of its sessions, and some of commands."""
    return 2 * most_sessions() + _SPARE // 2


def full(sessions: int) -> Unavailable:
    """Return the error for a session that is one too many."""
    return Unavailable(
        f"the daemon serves {sessions} sessions, and no more",
        hint="raise the limit of open files (`ulimit -Hn`) before the daemon starts; or save with daemon=False "
        "(SCARCTL_DAEMON=0)",
        kind="daemon-full",
    )


def turn_away(connection: socket.socket) -> None:
    """Close a connection that is one too many. Its peer learns why, if that can be said at once."""
    with contextlib.suppress(OSError, ScarError):
        connection.setblocking(False)
        protocol.send(connection, protocol.failure(full(most_sessions())))
    connection.close()


def listen(folder: Path) -> socket.socket:
    """Bind a socket and listen. The caller holds the daemon's lock, so an old socket file is nobody's."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(folder / protocol.SOCKET)
        with protocol.short_path(folder) as path, _private():
            listener.bind(path)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def _private() -> Iterator[None]:
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)
