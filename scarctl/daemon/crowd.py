"""Accept as many connections as the daemon's limit of open files allows.

A session has two connections. Its run has some files: the lock, the arena, the segment being written.
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
"""Most connections that wait to be accepted, if the system allows so many."""

MOST_DESCRIPTORS = 1 << 16
"""Most open files. More are useless: each session needs a few threads, too."""
_PER_SESSION = 6
_SPARE = 64
"""Descriptors for the daemon itself, and for the connections of commands."""
_MOST_SESSIONS = 2048


def raise_limit() -> None:
    """Raise the limit of open files as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_sessions() -> int:
    """Return the number of sessions that this process can serve."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_SESSIONS
    return max(1, min(_MOST_SESSIONS, (soft - _SPARE) // _PER_SESSION))


def most_connections() -> int:
    """Return the number of connections that this process can serve: sessions' connections, and some for commands."""
    return 2 * most_sessions() + _SPARE // 2


def full(sessions: int) -> Unavailable:
    """Return the error for a session above the limit."""
    return Unavailable(
        f"the daemon already serves {sessions} sessions, its limit",
        hint="raise the limit of open files (`ulimit -Hn`) before the daemon starts; or save with daemon=False "
        "(SCARCTL_DAEMON=0)",
        kind="daemon-full",
    )


def turn_away(connection: socket.socket) -> None:
    """Close a connection above the limit. The reason is sent if this needs no waiting."""
    with contextlib.suppress(OSError, ScarError):
        connection.setblocking(False)
        protocol.send(connection, protocol.failure(full(most_sessions())))
    connection.close()


def listen(folder: Path) -> socket.socket:
    """Bind a socket and listen. The caller holds the daemon's lock, so an old socket file has no owner."""
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
