"""Test whom a daemon admits, and whose refusal a sender believes."""

from __future__ import annotations

import secrets
import socket
import threading

import pytest

from scarctl.arena.arena import Arena
from scarctl.errors import Fenced
from scarctl.peers.channel import Channel
from scarctl.peers.frames import Kind
from scarctl.peers.handshake import SECRET_BYTES
from scarctl.peers.host import Host
from scarctl.peers.link import State
from scarctl.peers.sender import Sender
from tests.peers.test_host import SECRET, START, STORE, arena, follow, senders, west
from tests.support.waiting import wait_until

__all__ = ["arena", "senders", "west"]
pytestmark = pytest.mark.leaves_arena


def test_copies_of_one_store_at_two_places_do_not_lock_each_other_out(
    west: Host, arena: Arena, senders: list[Sender]
) -> None:
    """A copied store has the same id, so its members' start has the same name. A daemon may serve both."""
    other = "ab" * 16 + "." + "ee" * 8
    port = west.admit(START, SECRET, STORE, "127.0.0.1", 0)
    assert west.admit(START, secrets.token_bytes(SECRET_BYTES), other, "127.0.0.1", 0) == port
    sender, warned = follow(senders, arena, port)
    wait_until(lambda: "up to date" in sender.describe() or warned)
    assert warned == []


def test_a_stranger_cannot_say_that_a_run_is_over(west: Host, arena: Arena, senders: list[Sender]) -> None:
    """An invented record may lead to it. Only a host that has proved its identity ends a link for good."""
    said = Fenced("the run has continued elsewhere", kind="unknown-start")

    def refuse(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                channel = Channel(connection)
                channel.expect(Kind.HELLO)
                channel.refuse(said)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=refuse, args=(listener,), daemon=True)
        thread.start()
        sender, warned = follow(senders, arena, listener.getsockname()[1])
        wait_until(lambda: sender.state in (State.LOST, State.FENCED))
        assert sender.state is State.LOST
        assert warned == []
        said.kind = "fenced"
        wait_until(lambda: warned or sender.state is State.FENCED)
        assert "has not proved its identity" in warned[0]
        assert sender.state is not State.FENCED
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(30.0)
