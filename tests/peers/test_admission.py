"""Test whom a daemon admits, and whose refusal a sender believes."""

from __future__ import annotations

import secrets
import socket
import threading
from pathlib import Path

import pytest

from scarctl.arena.arena import Arena
from scarctl.errors import Fenced
from scarctl.peers.channel import Channel
from scarctl.peers.frames import Kind, encode
from scarctl.peers.handshake import SECRET_BYTES, Hello
from scarctl.peers.host import Host
from scarctl.peers.link import State
from scarctl.peers.replica import SUCCESSOR
from scarctl.peers.sender import Sender
from tests.daemon.rig import acknowledge
from tests.peers.test_host import (
    EVERYTHING,
    RUN,
    SECRET,
    START,
    STORE,
    arena,
    begin,
    follow,
    meet,
    replica,
    senders,
    west,
)
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


def test_a_host_that_never_knows_this_start_is_named(
    west: Host, arena: Arena, senders: list[Sender], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At first its ranks may be late. Another version of scarctl, or other files for TLS, look the same, and stay."""
    port = west.admit("22" * 16, SECRET, STORE, "127.0.0.1", 0)
    sender, warned = follow(senders, arena, port)
    wait_until(lambda: sender.state is State.LOST and sender.link.pause > 1.0)
    assert warned == []
    monkeypatch.setattr("scarctl.peers.sender.REPLACED_AFTER", 0.0)
    wait_until(lambda: warned)
    assert "host0 (127.0.0.1) is not kept up to date: that host does not know this start" in warned[0]
    west.admit(START, SECRET, STORE, "127.0.0.1", 0)
    wait_until(lambda: "up to date" in sender.describe())
    assert len(warned) == 1


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


def test_an_earlier_epoch_does_not_interrupt_the_first_copy_of_a_later_one(
    west: Host, arena: Arena, tmp_path: Path
) -> None:
    """A process that was cut off has the secret, too, and a complete replica here."""
    port = west.admit(START, SECRET, STORE, "127.0.0.1", 0)
    first: list[Sender] = []
    sender, _ = follow(first, arena, port)
    wait_until(lambda: "up to date" in sender.describe())
    sender.close(done=False, patience=30.0)
    channel = meet(port, Hello.new(START, RUN, 2))
    about = {"host": "east", "store": "", "base_epoch": 2, "process": "cc" * 16}
    begin(channel, encode(Kind.LAYOUT, about, arena.layout_json()))
    # It has sent no mark yet.
    for connected in (True, False):
        if not connected:
            channel.shut()
            wait_until(lambda: not west.busy)
        late, warned = follow(first, arena, port)
        wait_until(lambda: first[-1].state is State.FENCED)
        assert "epoch 1 is over" in warned[0]
        late.close(done=False, patience=30.0)
        assert len(west.status()) == connected, "the later one's connection"
        assert (tmp_path / "west" / f"{RUN}{SUCCESSOR}").exists()


@pytest.mark.parametrize("lasting", [True, False])
def test_memory_is_kept_for_those_who_can_prove_that_it_is_theirs(
    west: Host, arena: Arena, senders: list[Sender], tmp_path: Path, lasting: bool
) -> None:
    """A secret that is in a file is the same at the next start."""
    port = west.admit(START, SECRET, STORE, "127.0.0.1", 0, lasting=lasting)
    assert not west.wanted()
    sender, _ = follow(senders, arena, port)
    wait_until(lambda: "up to date" in sender.describe())
    sender.close(done=False, patience=30.0)
    assert west.wanted() == lasting
    west.admit(START, SECRET, "ff" * 16, "127.0.0.1", port)
    acknowledge(arena, EVERYTHING)
    arena.keep(arena.slot.moment)
    again, _ = follow(senders, arena, port)
    wait_until(lambda: (replica(tmp_path).durable == arena.version).all())
    wait_until(lambda: "up to date" in again.describe())
    assert not west.wanted(), "the store has everything"
