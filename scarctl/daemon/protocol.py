"""Exchange messages between sessions, commands and the host's daemon: small JSON over a private unix socket.

A message is its length (4 bytes, big-endian) and that many bytes of JSON: at most 64 KiB to the daemon, 1 MiB from it.
Messages carry no state: that is in the arena. Both sides check that their peer is a process of
the same user.
"""

from __future__ import annotations

import json
import os
import select
import socket
import stat
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scarctl.arena.folder import check_private, folder_error
from scarctl.errors import AccessDenied, Corruption, ScarError, UsageError, error_fields, error_from
from scarctl.store.format import MAX_SHARD, is_hex
from scarctl.store.store import Part

if TYPE_CHECKING:
    from scarctl.peers.sender import Candidate
    from scarctl.peers.tls import Tls

VERSION = 7
EVERY_VERSION = ("status", "stop")
"""Requests that a daemon answers in every version of the protocol, so that each scarctl can end it."""
MAX_MESSAGE = 64 << 10
MAX_REPLY = 1 << 20
SOCKET = "daemon.sock"

_LENGTH = struct.Struct(">I")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of struct ucred


class Closed(Exception):
    """The other side has closed the connection."""


def send(connection: socket.socket, message: dict[str, Any], limit: int = MAX_MESSAGE) -> None:
    """Send one message. Raises UsageError if it is too large, OSError if the connection is broken."""
    try:
        data = json.dumps(message, separators=(",", ":")).encode()
    except (TypeError, ValueError):
        # Storage options may be secret, so the message does not quote them.
        raise UsageError(
            "storage_options contain a value that cannot be sent to the daemon",
            hint="use plain values, or save from the training process with daemon=False (SCARCTL_DAEMON=0)",
        ) from None
    if len(data) > limit:
        raise UsageError(f"a message of {len(data)} bytes is more than {limit}")
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket, limit: int = MAX_MESSAGE) -> dict[str, Any]:
    """Return the next message. Raises Closed at the end, Corruption for bytes that are not a message, OSError."""
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if length > limit:
        raise Corruption(f"a message claims {length} bytes, more than {limit}")
    try:
        message = json.loads(_read(connection, length))
    except (ValueError, RecursionError) as error:
        raise Corruption(f"a message is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise Corruption("a message is not an object")
    return message


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise Closed
        data += part
    return data


def readable(connection: socket.socket, seconds: float = 0.0) -> bool:
    """Return whether a read would not block, now or within `seconds`. The end of the connection counts as readable."""
    return _ready(connection, select.POLLIN, seconds)


def writable(connection: socket.socket) -> bool:
    """Return whether a small message can be sent now without waiting."""
    return _ready(connection, select.POLLOUT)


def hung_up(connection: socket.socket) -> bool:
    """Return whether the peer has ended the connection, even if requests that it sent before are not read yet."""
    try:
        return _ready(connection, getattr(select, "POLLRDHUP", select.POLLHUP))
    except ValueError:  # closed on this side, too
        return True


def _ready(connection: socket.socket, event: int, seconds: float = 0.0) -> bool:
    # select() cannot handle descriptors above 1023.
    poll = select.poll()
    poll.register(connection, event)
    return bool(poll.poll(int(1000 * seconds)))


def failure(error: ScarError) -> dict[str, Any]:
    """Return the reply that carries an error."""
    return {"ok": False, "error": error_fields(error)}


def check_reply(reply: dict[str, Any]) -> dict[str, Any]:
    """Return the reply. If it carries an error, raise that."""
    if reply.get("ok") is True:
        return reply
    raise error_from(reply.get("error"))


def connect(folder: Path, timeout: float) -> socket.socket:
    """Open a connection to the daemon whose socket is in `folder`.

    Raises FileNotFoundError or ConnectionRefusedError if there is no daemon. Raises BlockingIOError if too many
    connections wait, and AccessDenied if the folder or the daemon belongs to another user.
    """
    os.lstat(folder)
    check_private(folder)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        if not stat.S_ISSOCK(os.lstat(folder / SOCKET).st_mode):
            raise ConnectionRefusedError(f"{folder / SOCKET} is not a socket")  # a new daemon replaces it
        with short_path(folder) as path:
            connection.connect(path)
        check_peer(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def check_peer(connection: socket.socket) -> int:
    """Raise AccessDenied unless the peer's process runs as this user. Return its process id, 0 if unknown."""
    if not hasattr(socket, "SO_PEERCRED"):
        return 0  # on other systems the folder's mode, checked before, keeps other users out
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    if uid != os.getuid():
        raise AccessDenied(f"the daemon's socket is used by user {uid}, not by you")
    return int(pid)


class short_path:  # noqa: N801
    """Context: a path to the socket in `folder` that fits the 108 bytes of a socket's address."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fd = -1

    def __enter__(self) -> str:
        path = str(self._folder / SOCKET)
        if len(os.fsencode(path)) < 100:
            return path
        try:
            self._fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise folder_error(error, self._folder) from error
        return f"/proc/self/fd/{self._fd}/{SOCKET}"

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)


# -- fields of a message -----------------------------------------------------------------------------------------


def text(message: dict[str, Any], key: str) -> str:
    """Return a field as a non-empty string. Raises UsageError."""
    value = message.get(key)
    if not isinstance(value, str) or not value or "\0" in value:
        raise UsageError(f"{key} must be a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{key} must be a string in UTF-8") from None  # JSON allows half a surrogate pair
    return value


def options(message: dict[str, Any]) -> dict[str, Any]:
    """Return the storage options. Raises UsageError."""
    found = message.get("options", {})
    if not isinstance(found, dict):
        raise UsageError("options must be an object")
    return found


def number(message: dict[str, Any], key: str) -> int:
    """Return a field as a whole number. Raises UsageError."""
    value = message.get(key)
    if type(value) is not int or not 0 <= value < 1 << 40:
        raise UsageError(f"{key} must be a whole number")
    return value


def token(message: dict[str, Any]) -> str:
    """Return the hex digits that identify a repeated request, "" without any. Raises UsageError."""
    value = message.get("token", "")
    if value != "" and not is_hex(value, 32):
        raise UsageError("token is 32 hex digits")
    return str(value)


def secret(message: dict[str, Any]) -> tuple[str, bytes]:
    """Return the name and the secret of a job's start. Raises UsageError, which does not quote them."""
    from scarctl.peers.handshake import SECRET_BYTES

    start, found = message.get("start"), message.get("secret")
    if not is_hex(start, 32) or not is_hex(found, 2 * SECRET_BYTES):
        raise UsageError("start and secret are hex digits")
    return str(start), bytes.fromhex(str(found))


def process(message: dict[str, Any]) -> str:
    """Return the name of a training process's start, "" if it is that of the job's. Raises UsageError."""
    found = message.get("process", "")
    if found != "" and not is_hex(found, 32):
        raise UsageError("process is 32 hex digits")
    return str(found)


def tls(message: dict[str, Any]) -> Tls | None:
    """Return the TLS settings of links, from the files that a message names. Raises UsageError (kind "peer-tls")."""
    from scarctl.peers.tls import Tls

    files = message.get("tls")
    if files is None:
        return None
    if not isinstance(files, list) or len(files) != 3 or not all(isinstance(path, str) for path in files):
        raise UsageError("tls is three paths")
    return Tls(files)


def rate(message: dict[str, Any]) -> float | None:
    """Return the bytes per second to send at most, None for no limit. Raises UsageError."""
    found = message.get("rate")
    if found is not None and not (isinstance(found, int | float) and found > 0):
        raise UsageError("a rate is a number above 0")
    return found


def candidates(message: dict[str, Any]) -> list[Candidate]:
    """Return the candidate daemons in a message. Raises UsageError."""
    from scarctl.peers.sender import Candidate

    found = message.get("peers")
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise UsageError("peers must be a list of objects")
    return [Candidate(text(one, "host"), text(one, "address"), number(one, "port")) for one in found]


def part(message: dict[str, Any]) -> Part | None:
    """Return the part of the store that a message names; None for the whole store."""
    found = message.get("part")
    if found is None:
        return None
    if not isinstance(found, dict):
        raise UsageError("part must be an object")
    shard = number(found, "shard")
    if shard > MAX_SHARD:
        raise UsageError("there is no such shard")
    current = found.get("current", False)
    if type(current) is not bool:
        raise UsageError("current must be true or false")
    return Part(shard, current)


def part_fields(part: Part | None) -> dict[str, Any] | None:
    """Return the fields from which `part` makes the same part."""
    if part is None:
        return None
    return {"shard": part.shard, **({"current": True} if part.current else {})}
