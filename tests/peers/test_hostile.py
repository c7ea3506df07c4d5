"""Test a hostile peer before and after its proof, with and without TLS: it ends its own connection, and nothing else.

Cases are drawn from a seed. A long form: SCARCTL_HOSTILE_CASES=2000 python -m pytest tests/peers/test_hostile.py
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scarctl.arena.arena import Arena
from scarctl.errors import ScarError
from scarctl.peers import channel as channels
from scarctl.peers.channel import Channel, Gone
from scarctl.peers.follower import Follower, most_body
from scarctl.peers.frames import MAX_BODY, MAX_STRANGER, PREFIX, Kind, encode
from scarctl.peers.handshake import Hello, answer
from scarctl.peers.host import Host
from scarctl.peers.sender import Sender
from scarctl.peers.tls import Tls
from tests.peers.test_host import RUN, SECRET, START, STORE, arena, follow, replica, senders, west
from tests.support.certificates import Authority
from tests.support.frames import joined
from tests.support.waiting import wait_until

__all__ = ["arena", "senders", "west"]
pytestmark = pytest.mark.leaves_arena
CASES = int(os.environ.get("SCARCTL_HOSTILE_CASES", "60"))
ABOUT = {"host": "x", "store": "", "base_epoch": 1}


class Peer:
    """A peer that knows how far it gets, and sends invalid data from there on."""

    def __init__(self, port: int, tls: Tls | None, closing: contextlib.ExitStack) -> None:
        self.connection = closing.enter_context(socket.create_connection(("127.0.0.1", port), 30.0))
        self.binding = ""
        if tls is not None:
            secured = closing.enter_context(tls.secure(self.connection, server=False, seconds=30.0))
            self.connection, self.binding = secured, tls.binding(secured, server=False)
        self.channel = Channel(self.connection)

    def greet(self) -> Hello:
        hello = Hello.new(START, RUN, 1)
        self.channel.send(encode(Kind.HELLO, hello.to_json()))
        return hello

    def prove(self) -> None:
        hello = self.greet()
        head, _ = self.channel.expect(Kind.CHALLENGE)
        self.channel.send(encode(Kind.PROOF, answer(SECRET, hello, head, self.binding)))
        self.channel.trust(30.0)

    def begin(self, arena: Arena) -> None:
        self.prove()
        self.channel.send(encode(Kind.LAYOUT, ABOUT, arena.layout_json()))
        self.channel.expect(Kind.ACK)

    def ends(self) -> None:
        """Wait until the other side ends the connection, whatever it still sends."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.connection, socket.SHUT_WR)
        self.connection.settimeout(30.0)
        with contextlib.suppress(ConnectionError, Gone, ScarError):
            while self.channel.receive():
                pass


def honest(arena: Arena) -> list[bytes]:
    """Return the frames of an honest round."""
    return [joined(frame) for frame in Follower(arena).round()]


def value(chance: random.Random) -> Any:
    return chance.choice(
        [
            -1, 0, 1, 2**31, 2**63, 2**64, 10**30, 1.5, None, True, "", "x" * 2000, "\0", "../../x", [], {},
            [[[[]]]], "\ud800",
        ]
    )  # fmt: skip


def mutated(frame: bytes, chance: random.Random) -> bytes:
    """Return a frame with a changed part, and often a valid checksum."""
    kind, size, body_size, _ = PREFIX.unpack(frame[: PREFIX.size])
    head = json.loads(frame[PREFIX.size :][:size])
    body = bytearray(frame[PREFIX.size + size :])
    what = chance.randrange(7)
    if what == 0 and head:
        head[chance.choice(list(head))] = value(chance)
    elif what == 1:
        for _ in range(chance.randrange(1, 9)):
            if body:
                body[chance.randrange(min(len(body), 400))] = chance.randrange(256)
    elif what == 2:
        del body[chance.randrange(len(body) + 1) :]
    elif what == 3:
        body += chance.randbytes(chance.randrange(1, 200))
    elif what == 4:
        kind = chance.choice(list(Kind))
    elif what == 5:  # false sizes
        claims = chance.choice([(size, MAX_BODY + 1), (size, 2**63), (0xFFFFFFFF, 0), (size, body_size + 10)])
        return PREFIX.pack(kind, claims[0], claims[1], 0) + frame[PREFIX.size :]
    else:  # random bytes anywhere
        data = bytearray(frame)
        data[chance.randrange(min(len(data), 200))] ^= 1 << chance.randrange(8)
        return bytes(data)
    return joined(encode(Kind(kind), head, bytes(body)))


def before_the_proof(peer: Peer, arena: Arena, chance: random.Random) -> bytes:
    hello = joined(encode(Kind.HELLO, Hello.new(START, RUN, 1).to_json()))
    if chance.random() < 0.5:
        peer.greet()
        peer.channel.expect(Kind.CHALLENGE)
        hello = joined(encode(Kind.PROOF, {"proof": chance.randbytes(32).hex()}))
    return chance.choice(
        [
            mutated(hello, chance),
            chance.randbytes(chance.randrange(1, 3 * MAX_STRANGER)),
            PREFIX.pack(Kind.BATCH, MAX_STRANGER, MAX_BODY, 0),
            chance.choice(honest(arena)),
        ]
    )


def instead_of_a_layout(peer: Peer, arena: Arena, chance: random.Random) -> bytes:
    peer.prove()
    layout = json.loads(arena.layout_json())
    node = layout
    while isinstance(node, dict | list) and node and chance.random() < 0.8:
        key = chance.choice(list(node) if isinstance(node, dict) else range(len(node)))
        if not isinstance(node[key], dict | list) or chance.random() < 0.2:
            node[key] = value(chance)
            break
        node = node[key]
    bodies = [
        json.dumps(layout).encode(),
        b"[" * 100_000,
        b"{}",
        b"\xff" * 9,
        b'{"groups":[' + b"{}," * 999 + b"{}]}",
    ]
    about = {**ABOUT, **({chance.choice(list(ABOUT)): value(chance)} if chance.random() < 0.3 else {})}
    return joined(encode(Kind.LAYOUT, about, chance.choice(bodies)))


def after_the_proof(peer: Peer, arena: Arena, chance: random.Random) -> bytes:
    peer.begin(arena)
    frames = honest(arena)
    good = frames[: chance.randrange(len(frames))]
    return b"".join([*good, mutated(chance.choice(frames), chance), *frames[: chance.randrange(2)]])


STAGES: list[Callable[[Peer, Arena, random.Random], bytes]] = [
    before_the_proof,
    instead_of_a_layout,
    after_the_proof,
]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Record whether the peer was trusted, and the bytes, each time that space for a body was allocated."""
    found: list[tuple[bool, int]] = []
    original = Channel._staged

    def note(self: Channel, size: int) -> Any:
        found.append((self._trusted, size))
        return original(self, size)

    monkeypatch.setattr(Channel, "_staged", note)
    return found


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_hostile_peer_harms_nothing(
    west: Host,
    arena: Arena,
    senders: list[Sender],
    tmp_path: Path,
    authority: Authority,
    staged: list[tuple[bool, int]],
    caplog: pytest.LogCaptureFixture,
    stage: Callable[[Peer, Arena, random.Random], bytes],
    encrypted: bool,
) -> None:
    caplog.set_level("WARNING")
    tls = Tls(authority.host("west")) if encrypted else None
    port = west.admit(START, SECRET, STORE, "127.0.0.1", 0, tls)
    for number in range(CASES):
        chance = random.Random(f"{stage.__name__}/{number}")
        with contextlib.ExitStack() as closing:
            peer = Peer(port, tls, closing)
            with contextlib.suppress(Gone, ScarError, OSError):
                # It may end before everything is sent.
                peer.connection.sendall(stage(peer, arena, chance))
            peer.ends()
        assert "unexpectedly" not in caplog.text, (number, caplog.text)
    wait_until(lambda: not west.busy)
    assert all(size == 0 for trusted, size in staged if not trusted), (
        "a stranger's body is never made room for"
    )
    assert max(size for _, size in staged) <= MAX_BODY
    assert {path.name.partition(".successor")[0] for path in (tmp_path / "west").iterdir()} <= {RUN}
    assert {path.name for path in tmp_path.iterdir()} == {"west", "east"}
    # The next honest peer repairs the replica, unless a later epoch is permanently in its way.
    sender, _ = follow(senders, arena, port, tls=None if tls is None else Tls(authority.host("east")))
    wait_until(lambda: "up to date" in sender.describe() or sender.link.ended)
    if not sender.link.ended:
        assert replica(tmp_path).memory().tobytes() == arena.memory().tobytes()


def test_room_is_made_for_no_more_than_a_batch(west: Host, arena: Arena) -> None:
    """An admitted peer claims a larger body than its layout can have, and is refused before it sends a byte of it."""
    port = west.admit(START, SECRET, STORE, "127.0.0.1", 0)
    with contextlib.ExitStack() as closing:
        peer = Peer(port, None, closing)
        peer.begin(arena)
        claim = most_body(arena) + 1
        peer.connection.sendall(PREFIX.pack(Kind.BATCH, 2, claim, 0) + b"{}")
        with pytest.raises(ScarError, match=f"claims {claim} bytes"):
            peer.channel.expect(Kind.ACK)


def test_who_sends_byte_by_byte_is_not_waited_for(west: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit of a stranger is for all its bytes together."""
    monkeypatch.setattr(channels, "STRANGER_SECONDS", 0.5)
    port = west.admit(START, SECRET, STORE, "127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        data = iter(joined(encode(Kind.HELLO, Hello.new(START, RUN, 1).to_json())))
        connection.settimeout(0.1)
        for byte in data:
            try:
                connection.sendall(struct.pack("B", byte))
                if connection.recv(1) == b"":
                    return
            except TimeoutError:
                continue
            except ConnectionError:
                return
    raise AssertionError("it was waited for")


def test_many_who_say_nothing_do_not_keep_others_out_for_long(
    west: Host, arena: Arena, senders: list[Sender], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "STRANGER_SECONDS", 1.0)
    port = west.admit(START, SECRET, STORE, "127.0.0.1", 0)
    with contextlib.ExitStack() as closing:
        for _ in range(100):
            closing.enter_context(socket.create_connection(("127.0.0.1", port)))
        sender, _ = follow(senders, arena, port)
        wait_until(lambda: "up to date" in sender.describe())
