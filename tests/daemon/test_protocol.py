"""Test messages: which are received unchanged, and which are refused."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scarctl import errors
from scarctl.daemon import protocol
from scarctl.errors import (
    AccessDenied,
    Corruption,
    NoStore,
    ScarError,
    Unavailable,
    UsageError,
    error_fields,
    error_from,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair()
    with a, b:
        a.settimeout(5)
        b.settimeout(5)
        yield a, b


def exchange(data: bytes, *, end: bool = True) -> dict[str, Any]:
    """Return what the other side reads from these bytes."""
    a, b = socket.socketpair()
    with a, b:
        b.settimeout(5)
        sender = threading.Thread(target=lambda: (a.sendall(data), a.shutdown(socket.SHUT_WR)))
        sender.start()
        try:
            return protocol.receive(b)
        finally:
            b.close()
            sender.join()


@given(message=st.dictionaries(st.text(), JSON, max_size=5))
def test_what_is_sent_arrives(message: dict[str, Any]) -> None:
    a, b = socket.socketpair()
    with a, b:
        protocol.send(a, message)
        protocol.send(a, {})
        assert protocol.receive(b) == message
        assert protocol.receive(b) == {}


@given(data=st.binary(max_size=300), framed=st.booleans())
def test_garbage_is_never_anything_but_turned_away(data: bytes, framed: bool) -> None:
    try:
        message = exchange(struct.pack(">I", len(data)) + data if framed else data)
    except Corruption:
        return
    except protocol.Closed:
        assert not framed
        return
    assert isinstance(message, dict)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 30000,
        b'{"a":' * 10000,
        b"[]",
        b'"text"',
        b"7",
        b"null",
        b"",
        b"\xff\xfe\x00",
        b'{"a": 1',
        b"1" * 60000,
    ],
    ids=lambda content: repr(content[:12]),
)
def test_what_is_no_object_is_turned_away(content: bytes) -> None:
    with pytest.raises(Corruption):
        exchange(struct.pack(">I", len(content)) + content)


@pytest.mark.parametrize("length", [protocol.MAX_MESSAGE + 1, 1 << 31, (1 << 32) - 1])
def test_a_length_beyond_the_limit_is_not_waited_for(
    pair: tuple[socket.socket, socket.socket], length: int
) -> None:
    pair[0].sendall(struct.pack(">I", length))
    with pytest.raises(Corruption, match=str(length)):
        protocol.receive(pair[1])


@pytest.mark.parametrize("size", [0, 3, 4, 10])
def test_half_a_message_is_the_end(size: int) -> None:
    with pytest.raises(protocol.Closed):
        exchange((struct.pack(">I", 20) + b'{"a": "bcd"}')[:size])


def test_large_messages_are_not_even_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(UsageError):
        protocol.send(pair[0], {"a": "x" * protocol.MAX_MESSAGE})
    protocol.send(pair[0], {"a": "x" * protocol.MAX_MESSAGE}, protocol.MAX_REPLY)
    with pytest.raises(Corruption):
        protocol.receive(pair[1])


def all_errors() -> list[type[ScarError]]:
    found = [ScarError]
    for known in found:
        found += known.__subclasses__()
    return [known for known in found if known.__module__ == errors.__name__]


@pytest.mark.parametrize("known", all_errors(), ids=lambda known: known.__name__)
@pytest.mark.parametrize("kind", [None, "more-precise"])
def test_errors_keep_class_kind_and_words(known: type[ScarError], kind: str | None) -> None:
    error = known("what failed", hint="what to do", kind=kind)
    reply = json.loads(json.dumps(protocol.failure(error)))
    with pytest.raises(known) as caught:
        protocol.check_reply(reply)
    assert type(caught.value) is known
    assert (caught.value.kind, str(caught.value)) == (error.kind, str(error))


def test_an_error_of_an_unknown_class_is_still_an_error() -> None:
    fields = error_fields(NoStore("x")) | {"type": "of-the-future", "kind": "of-the-future"}
    assert type(error_from(fields)) is ScarError


@pytest.mark.parametrize("reply", [{}, {"ok": 1}, {"ok": False}, {"error": []}, {"error": {"type": 1}}])
def test_replies_that_cannot_be_understood(reply: dict[str, Any]) -> None:
    with pytest.raises(Corruption):
        protocol.check_reply(reply)


def test_readable_and_writable_never_wait(pair: tuple[socket.socket, socket.socket]) -> None:
    a, b = pair
    assert (protocol.readable(b), protocol.writable(a)) == (False, True)
    protocol.send(a, {})
    assert protocol.readable(b)
    protocol.receive(b)
    a.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            a.send(b"x" * 4096)
    assert not protocol.writable(a)
    a.close()
    assert protocol.readable(b), "the end is something to read"


def test_a_peer_of_another_user_is_refused(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    with pytest.raises(AccessDenied):
        protocol.check_peer(pair[0])


def test_long_paths_still_reach_the_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir(mode=0o700)
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        with protocol.short_path(folder) as path:
            assert len(path) < 100
            listener.bind(path)
        listener.listen()
        assert (folder / protocol.SOCKET).is_socket()
        with protocol.connect(folder, 5) as connection:
            assert protocol.check_peer(connection) == os.getpid()
    with pytest.raises(Unavailable), protocol.short_path(folder / "missing"):
        pass


def test_no_folder_no_socket_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        protocol.connect(tmp_path / "missing", 5)
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    with pytest.raises(FileNotFoundError):
        protocol.connect(folder, 5)
    listener = socket.socket(socket.AF_UNIX)
    with protocol.short_path(folder) as path:
        listener.bind(path)
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        protocol.connect(folder, 5)
    folder.chmod(0o755)
    with pytest.raises(AccessDenied):
        protocol.connect(folder, 5)
