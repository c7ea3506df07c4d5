"""Test that a host which fails, lies or stalls while memory is fetched from it costs a line in the log, no more."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scarctl.arena.arena import Arena
from scarctl.arena.transfer import PIECE, Outgoing
from scarctl.peers import fetch as fetching
from scarctl.peers.channel import Channel
from scarctl.peers.frames import MAX_FILES, PREFIX, Kind, Offer, encode
from tests.peers.lending import Liar, Site, sites
from tests.peers.test_hostile import mutated
from tests.support.frames import joined

pytestmark = pytest.mark.leaves_arena
CASES = int(os.environ.get("SCARCTL_HOSTILE_CASES", "20"))


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Site]]:
    with sites(tmp_path, "east", "west", "north") as made:
        yield made


@pytest.fixture
def two(three: list[Site]) -> tuple[Site, Site]:
    """Return East, which has step 5, and West, which has step 2 of the same."""
    east, west, _ = three
    west.train(2)
    shutil.copytree(west.place, east.place)
    east.train(5)
    return east, west


def lend(site: Site) -> Offer:
    """Return what a host offers."""
    offer = site.host._lender._offer(site.view().run_id)
    assert offer is not None
    outgoing = outgoing_of(site)
    offer = replace(offer, size=outgoing.size, gap=outgoing.gap)
    outgoing.close()
    return offer


def outgoing_of(site: Site, **options: Any) -> Outgoing:
    arena = Arena.open_existing(site.place, run_id=site.view().run_id)
    assert arena is not None
    outgoing = Outgoing(arena, **options)
    arena.close()
    return outgoing


def newer(offer: Offer, **changed: Any) -> Offer:
    """Return an offer of a later step."""
    epoch, step, steps = offer.age
    age = changed.pop("age", (epoch, step + 1, steps))
    size = changed.pop("size", offer.size)
    return replace(offer, age=age, size=size, **changed)


Answer = Callable[[Channel, Kind], object]


def offering(offer: Offer, then: Callable[[Channel], object]) -> Answer:
    """Return the behaviour of a host that makes this offer, and then does something."""

    def answer(channel: Channel, kind: Kind) -> None:
        channel.send(offer.frame(kind))
        if kind is Kind.FETCH:
            channel.expect(Kind.ACK)
            then(channel)

    return answer


def pieces(channel: Channel, data: bytes, digest: str = "0" * 32) -> None:
    for at in range(0, len(data), PIECE):
        channel.send(encode(Kind.PIECE, {}, data[at : at + PIECE]))
    channel.send(encode(Kind.END, {"digest": digest}))
    channel.receive()


def honest(site: Site) -> tuple[bytes, str]:
    """Return the bytes of a host's arena without its small files, and their digest."""
    outgoing = outgoing_of(site, most=-1)
    data = outgoing.read(0, outgoing.size).tobytes()
    digest = outgoing.digest()
    outgoing.close()
    return data, digest


def test_a_host_that_fails_midway_is_followed_by_the_next_best(
    three: list[Site], caplog: pytest.LogCaptureFixture
) -> None:
    east, west, north = three
    west.train(2)
    north.train(4)
    east.train(5)
    data, _ = honest(east)
    cut = offering(newer(lend(east)), lambda channel: channel.send([data[:100]]))
    with Liar(cut) as liar:
        found = west.fetch(north.listen(), liar, east.listen())
    assert found is not None
    assert found.host == "east"
    assert west.step() == 5
    assert "memory on liar is not used" in caplog.text


LIES: dict[str, Callable[[Offer, bytes, str], Answer]] = {
    "2**60 bytes": lambda offer, data, digest: offering(newer(offer, size=1 << 60), lambda channel: None),
    "more files than it sends": lambda offer, data, digest: offering(
        newer(offer, files=MAX_FILES), lambda channel: pieces(channel, data)
    ),
    "a longer file": lambda offer, data, digest: offering(
        newer(offer, files=2, files_size=4),
        lambda channel: channel.send(encode(Kind.FILE, {"name": "line"}, b"12345")),
    ),
    "a longer piece": lambda offer, data, digest: offering(
        newer(offer), lambda channel: pieces(channel, data + bytes(1), digest)
    ),
    "a shorter piece": lambda offer, data, digest: offering(
        newer(offer), lambda channel: pieces(channel, data[:-1], digest)
    ),
    "more pieces": lambda offer, data, digest: offering(
        newer(offer), lambda channel: channel.send(encode(Kind.PIECE, {}, data) * 3)
    ),
    "a piece of 200 MiB": lambda offer, data, digest: offering(
        newer(offer), lambda channel: channel.send([PREFIX.pack(Kind.PIECE, 2, 200 << 20, 0) + b"{}"])
    ),
    "another digest": lambda offer, data, digest: offering(
        newer(offer), lambda channel: pieces(channel, data)
    ),
    "no digest": lambda offer, data, digest: offering(
        newer(offer), lambda channel: pieces(channel, data, "x")
    ),
    "another age than the arena has": lambda offer, data, digest: offering(
        newer(offer), lambda channel: pieces(channel, data, digest)
    ),
    "another file": lambda offer, data, digest: offering(
        newer(offer, size=8192), lambda channel: pieces(channel, bytes(8192), digest)
    ),
    "frames that are not expected": lambda offer, data, digest: offering(
        newer(offer), lambda channel: channel.send(encode(Kind.BATCH, {"count": 1}, bytes(40)))
    ),
    "an answer of 200 MiB": lambda offer, data, digest: (
        lambda channel, kind: channel.send([PREFIX.pack(kind, 2, 200 << 20, 0) + b"{}"])
    ),
    "an impossible offer": lambda offer, data, digest: (
        lambda channel, kind: channel.send(encode(kind, {"found": True, "newest": -1}))
    ),
    "no offer": lambda offer, data, digest: lambda channel, kind: channel.send(encode(kind, {})),
    "bytes": lambda offer, data, digest: lambda channel, kind: channel.send([b"x" * 5000]),
}
"""What an authenticated host may send, from a true offer and the bytes and digest of a true arena.

`tests/arena/test_transfer.py` has what the receiving end refuses by itself.
"""


@pytest.mark.parametrize("lie", LIES)
def test_an_authenticated_host_that_lies_costs_a_line_in_the_log(
    two: tuple[Site, Site], caplog: pytest.LogCaptureFixture, lie: str
) -> None:
    east, west = two
    before = west.files()
    with Liar(LIES[lie](lend(east), *honest(east))) as liar:
        assert west.fetch(liar) is None
    assert west.files() == before
    assert [record.levelname for record in caplog.records if "liar" in record.message] == ["WARNING"]
    assert "unexpectedly" not in caplog.text
    assert west.fetch(east.listen()) is not None


def conversation(site: Site) -> list[bytes]:
    """Return the frames with which a host lends its arena."""
    offer = lend(site)
    outgoing = outgoing_of(site)
    files = [encode(Kind.FILE, {"name": name}, data) for name, data in outgoing.files()]
    piece = outgoing.read(0, outgoing.size).copy()
    head = replace(offer, files=len(files), files_size=outgoing.files_size)
    frames = [head.frame(Kind.FETCH), *files, encode(Kind.PIECE, {}, piece)]
    frames += [encode(Kind.END, {"digest": outgoing.digest()}), encode(Kind.ACK, {})]
    outgoing.close()
    return [joined(frame) for frame in frames]


def corrupted(frames: list[bytes], chance: random.Random) -> list[bytes]:
    """Return a conversation with something changed, missing, repeated or swapped."""
    found, at, other = list(frames), chance.randrange(len(frames)), chance.randrange(len(frames))
    what = chance.randrange(8)
    if what == 0:
        del found[at]
    elif what == 1:
        found.insert(other, found[at])
    elif what == 2:
        found[at], found[other] = found[other], found[at]
    elif what == 3:
        found[at] = chance.randbytes(chance.randrange(400))
    else:
        found[at] = mutated(found[at], chance)
    return found


def test_any_change_of_the_conversation_brings_nothing_or_all_of_it(
    two: tuple[Site, Site], caplog: pytest.LogCaptureFixture
) -> None:
    east, west = two
    before, frames, brought = west.files(), conversation(east), 0
    kept = west.home.with_name("kept")
    shutil.copytree(west.home, kept)
    for number in range(CASES):
        chance = random.Random(f"lender/{number}")
        inventory = joined(lend(east).frame(Kind.INVENTORY))
        inventory = mutated(inventory, chance) if chance.random() < 0.2 else inventory
        sent = corrupted(frames, chance)

        def answer(channel: Channel, kind: Kind, inventory: bytes = inventory, sent: Any = sent) -> None:
            channel.send([inventory] if kind is Kind.INVENTORY else sent)

        with Liar(answer) as liar:
            found = west.fetch(liar)
        assert "unexpectedly" not in caplog.text, (number, caplog.text)
        if found is None:
            assert west.files() == before, number
        else:
            assert west.step() == 5, number
            brought += 1
            shutil.rmtree(west.home)
            shutil.copytree(kept, west.home)
    assert 0 < brought < CASES


@pytest.mark.parametrize("stage", ["an offer", "the head", "a piece", "the end", "byte by byte"])
@pytest.mark.long
def test_a_host_that_stalls_is_not_waited_for(
    two: tuple[Site, Site], monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    east, west = two
    before = west.files()
    offer, (data, _) = newer(lend(east)), honest(east)
    done = threading.Event()

    def answer(channel: Channel, kind: Kind) -> None:
        if kind is Kind.INVENTORY and stage != "an offer":
            channel.send(offer.frame(kind))
            return
        if kind is Kind.FETCH and stage not in ("an offer", "the head"):
            channel.send(offer.frame(kind))
            channel.expect(Kind.ACK)
            if stage == "the end":
                channel.send(encode(Kind.PIECE, {}, data))
        if stage == "byte by byte":
            while True:  # until the other side has closed the connection
                channel.send([PREFIX.pack(Kind.PIECE, 2, len(data), 0)[:1]])
                done.wait(0.05)
        done.wait(60.0)

    monkeypatch.setattr(fetching, "PIECE_SECONDS", 0.5)
    seconds = 0.5 if stage == "an offer" else 20.0
    with Liar(answer) as liar:
        assert west.fetch(liar, seconds=seconds) is None
        done.set()
    assert west.files() == before
