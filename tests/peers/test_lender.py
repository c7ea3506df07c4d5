"""Test the host that lends an arena: to whom, how long, and what a hostile borrower can do."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scarctl.arena.arena import Arena
from scarctl.arena.line import Word
from scarctl.arena.transfer import Outgoing
from scarctl.errors import Contention, NoIntactCopy, ScarError, Unavailable
from scarctl.peers import connect, lender
from scarctl.peers.channel import Channel, Gone
from scarctl.peers.connect import connected
from scarctl.peers.frames import MAX_BODY, PREFIX, Kind, decode_offer, encode
from scarctl.peers.handshake import Hello
from scarctl.peers.link import State
from scarctl.peers.sender import Sender, Source
from scarctl.store import Store
from tests.peers.lending import SECRET, START, Site, sites
from tests.peers.test_hostile import mutated
from tests.support.frames import joined
from tests.support.waiting import wait_until

pytestmark = pytest.mark.leaves_arena
CASES = int(os.environ.get("SCARCTL_HOSTILE_CASES", "60"))


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[Site]]:
    with sites(tmp_path, "east", "west") as made:
        made[0].train(5)
        made[0].listen()
        yield made


@contextlib.contextmanager
def asking(site: Site, run: str | None = None) -> Iterator[Channel]:
    hello = Hello.new(START, run or site.view().run_id, 1)
    with connected("127.0.0.1", site.port, hello, SECRET, None) as channel:
        yield channel


def is_free(site: Site) -> bool:
    """Return whether no one holds the lock of a host's arena."""
    try:
        arena = Arena.open_existing(site.place, run_id=site.view().run_id, patience=0.0)
    except Contention:
        return False
    assert arena is not None
    arena.close()
    return True


def test_the_inventory_says_what_there_is_and_nothing_is_locked(two: list[Site]) -> None:
    east, west = two
    with asking(east) as channel:
        channel.send(encode(Kind.INVENTORY, {}))
        offer = decode_offer(*channel.expect(Kind.INVENTORY))
        assert offer is not None
        assert offer.age[:2] == (1, 5)
        line = east.view().line()
        assert line is not None
        assert (offer.epoch, offer.line) == (1, Word(line.id, line.k))
        assert offer.size == (east.place / "arena").stat().st_size
        assert is_free(east)
    west.listen()
    with asking(west) as channel:
        channel.send(encode(Kind.INVENTORY, {}))
        assert decode_offer(*channel.expect(Kind.INVENTORY)) is None
        channel.send(encode(Kind.FETCH, {}))
        with pytest.raises(NoIntactCopy):
            channel.expect(Kind.FETCH)
    assert list(west.home.iterdir()) == []


@pytest.mark.parametrize("run", ["{}/../x", "../{}", "{}.aside", "{}.successor", "{}\n"])
def test_only_an_arena_in_its_place_is_lent(two: list[Site], run: str) -> None:
    east, _ = two
    name = run.format(east.view().run_id)
    for suffix in (".aside", ".successor"):
        shutil.copytree(east.place, east.place.with_name(east.place.name + suffix))
    for kind in (Kind.INVENTORY, Kind.FETCH):
        with asking(east, name) as channel:
            channel.send(encode(kind, {}))
            with pytest.raises((Gone, ScarError)):
                channel.receive()
    assert is_free(east)


def test_a_borrower_that_goes_frees_the_arena(two: list[Site]) -> None:
    east, west = two
    with asking(east) as channel:
        channel.send(encode(Kind.FETCH, {}))
        channel.expect(Kind.FETCH)
        assert not is_free(east)
        assert east.host.busy  # the daemon does not end meanwhile
    wait_until(lambda: is_free(east))
    wait_until(lambda: not east.host.busy)
    assert west.fetch(east.candidate) is not None


def test_there_are_not_many_borrowers_at_once(two: list[Site], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lender, "_MOST_LOANS", 2)
    east, west = two
    with contextlib.ExitStack() as open_ones:
        for _ in range(2):
            channel = open_ones.enter_context(asking(east))
            channel.send(encode(Kind.FETCH, {}))
            channel.expect(Kind.FETCH)
        with asking(east) as channel:
            channel.send(encode(Kind.FETCH, {}))
            with pytest.raises(Contention) as caught:
                channel.expect(Kind.FETCH)
        assert caught.value.kind == "run-busy"
    wait_until(lambda: not east.host.busy)
    assert west.fetch(east.candidate) is not None


def test_a_replica_is_lent_while_its_owner_sends_and_the_link_goes_on(
    two: list[Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """East was cut off, and still trains. West has its replica, and north fetches that: complete, and of one moment."""
    east, west = two
    west.listen()
    view = east.view()
    arena = Arena.share(east.place, run_id=view.run_id)
    assert arena is not None
    source = Source(view.run_id, "", "east", START, SECRET, None)
    sender = Sender(source, [west.candidate], arena)
    sender.start()
    wait_until(lambda: "up to date" in sender.describe())
    read, began, go = Outgoing.read, threading.Event(), threading.Event()

    def held(self: Outgoing, at: int, size: int) -> Any:
        began.set()
        assert go.wait(60.0)
        return read(self, at, size)

    monkeypatch.setattr(Outgoing, "read", held)
    with sites(east.home.parents[1] / "more", "north") as (north,):
        north.store = east.store
        found: list[Any] = []
        fetching = threading.Thread(target=lambda: found.append(north.fetch(west.candidate)))
        fetching.start()
        assert began.wait(60.0)
        east.train(6)
        wait_until(lambda: sender.state is State.LOST)  # it tries again
        go.set()
        fetching.join()
        assert found[0] is not None
        assert north.step() == 5
    wait_until(lambda: "up to date" in sender.describe())
    assert west.step() == 6
    sender.close(done=False, patience=30.0)


def test_who_says_nothing_after_the_proof_is_not_waited_for(
    two: list[Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    east, _ = two
    monkeypatch.setattr(lender, "_IDLE_SECONDS", 0.2)
    with asking(east) as channel:
        channel.send(encode(Kind.INVENTORY, {}))
        channel.expect(Kind.INVENTORY)
        with pytest.raises(Gone):
            channel.receive()


def hostile(chance: random.Random) -> bytes:
    """Return what a hostile borrower sends after its proof."""
    kinds = [Kind.INVENTORY, Kind.FETCH, Kind.ACK, Kind.FILE, Kind.PIECE, Kind.END, Kind.LAYOUT, Kind.BATCH]
    frames = []
    for kind in (Kind.INVENTORY, Kind.FETCH, Kind.ACK, Kind.ACK)[chance.randrange(3) :]:
        frames.append(joined(encode(kind, {"count": 1}, b"")))
    at = chance.randrange(len(frames))
    strange = encode(
        chance.choice(kinds), {"count": chance.randrange(-9, 9)}, chance.randbytes(chance.randrange(200))
    )
    frames[at] = chance.choice(
        [
            mutated(frames[at], chance),
            joined(strange),
            PREFIX.pack(chance.choice(kinds), 2, MAX_BODY, 0) + b"{}",
            chance.randbytes(chance.randrange(1, 300)),
        ]
    )
    return b"".join(frames)


def test_a_hostile_borrower_changes_nothing(two: list[Site], caplog: pytest.LogCaptureFixture) -> None:
    east, west = two
    before = east.files()
    for number in range(CASES):
        chance = random.Random(f"borrower/{number}")
        with asking(east) as channel:
            with contextlib.suppress(OSError):
                channel._connection.sendall(hostile(chance))
                socket.socket.shutdown(channel._connection, socket.SHUT_WR)
            channel.within(60.0)
            with contextlib.suppress(Gone, ScarError):
                while channel.receive():
                    pass
        assert "unexpectedly" not in caplog.text, (number, caplog.text)
    wait_until(lambda: not east.host.busy)
    left = {name: data for name, data in east.files().items() if ".successor" not in name}
    assert left == before
    assert west.fetch(east.candidate) is not None


def test_a_connection_has_one_limit_for_all_its_parts(
    two: list[Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other side accepts connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = int(silent.getsockname()[1])
        hello = Hello.new(START, "x", 1)
        with pytest.raises(Gone), connected("127.0.0.1", port, hello, SECRET, None, seconds=0.2):
            pass
        monkeypatch.setattr(connect, "STRANGER_SECONDS", 0.2)
        with pytest.raises(Gone), connected("127.0.0.1", port, hello, SECRET, None):
            pass


def test_a_store_that_cannot_be_read_makes_nothing_believed(
    two: list[Site], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    east, west = two

    def away(_: Store) -> Any:
        raise Unavailable("the store is away")

    monkeypatch.setattr(Store, "line", away)
    assert west.fetch(east.candidate) is None
    assert "the store is away" in caplog.text
    assert west.files() == {}
