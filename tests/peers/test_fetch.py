"""Test fetching a member's memory from other hosts: the newest of the store's own, complete, or nothing at all."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scarctl.arena.age import age_of
from scarctl.arena.arena import Arena
from scarctl.arena.kinship import ASIDE, take
from scarctl.arena.owner import Owner, read_owner, write_owner
from scarctl.arena.transfer import Outgoing
from scarctl.arena.view import peek
from scarctl.peers.channel import Channel
from scarctl.peers.fetch import Asker, fetch_memory
from scarctl.peers.frames import Kind, encode
from scarctl.peers.lender import PIECE_SECONDS
from scarctl.peers.sender import Candidate
from scarctl.peers.tls import Tls
from tests.peers.lending import SECRET, START, Liar, Site, sites
from tests.support.certificates import Authority

pytestmark = pytest.mark.leaves_arena
NOBODY = Candidate("nobody", "127.0.0.1", 1)
"""A host that refuses connections."""


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Site]]:
    with sites(tmp_path, "east", "west", "north") as made:
        yield made


# -- how fast ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "paced"), [(None, -1), (1e6, 1_000_000), (10.0, 65_536)])
def test_the_other_host_keeps_its_rate(
    three: list[Site], monkeypatch: pytest.MonkeyPatch, rate: float | None, paced: int
) -> None:
    """The kernel paces the connection on which the memory is sent. This host gives each piece time for that rate."""
    east, west, _ = three
    east.train(5)
    kept: list[int] = []
    patience: list[float] = []
    send, within = Channel.send, Channel.within

    def sending(self: Channel, frame: Any) -> None:
        if bytes(memoryview(frame[0])[:1]) == bytes([Kind.PIECE]):
            kept.append(self._connection.getsockopt(socket.SOL_SOCKET, 47))
        send(self, frame)

    def waiting(self: Channel, seconds: float | None) -> None:
        patience.append(seconds or 0.0)
        within(self, seconds)

    monkeypatch.setattr(Channel, "send", sending)
    monkeypatch.setattr(Channel, "within", waiting)
    found = west.fetch(east.listen(rate=rate))
    assert found is not None
    assert west.step() == 5
    assert kept == [paced], "-1 is no limit"
    slowest = PIECE_SECONDS + (found.bytes / paced if rate else 0.0)
    assert patience.count(pytest.approx(slowest)) >= 2, "on both sides"


def test_hosts_that_never_answer_are_asked_at_once(three: list[Site]) -> None:
    east, west, _ = three
    east.train(5)
    with contextlib.ExitStack() as silent:
        mute = [silent.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(40)]
        hosts = [Candidate("mute", "127.0.0.1", one.getsockname()[1]) for one in mute]
        began = time.monotonic()
        assert west.fetch(*hosts, east.listen(), seconds=3.0) is not None
    assert west.step() == 5
    assert time.monotonic() - began < 60, "3 s at once, not one after the other"


# -- which one -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", [False, True])
def test_it_is_brought_with_its_hand_overs_and_stays_where_it_was(three: list[Site], there: bool) -> None:
    east, west, _ = three
    if there:
        west.train(2, durable=True)
    east.train(3, durable=True)
    east.train(5)
    before = east.files()
    found = west.fetch(NOBODY, east.listen())
    assert found is not None
    assert found.host == "east"
    assert found.bytes < (east.place / "arena").stat().st_size, "one slot is enough"
    assert west.step() == 5
    assert east.files() == before
    assert west.place.with_name(west.place.name + ASIDE).exists() == there
    # A session takes it as it takes a replica.
    assert read_owner(west.place) == Owner("east", "", 2 + there)
    west.train(6)
    assert west.step() == 6


def test_of_several_the_newest_by_epoch_and_step_is_brought(three: list[Site]) -> None:
    east, west, north = three
    east.train(9)
    north.train(4)  # of a later epoch: no process has continued from step 9
    hosts = east.listen(), north.listen()
    found = west.fetch(*hosts)
    assert found is not None
    assert found.host == "north"
    assert west.step() == 4
    assert west.fetch(*hosts) is None  # it has that one now


def test_only_what_is_newer_than_something_else_is_brought(three: list[Site]) -> None:
    """Another host of the job can send an arena of this age."""
    east, west, _ = three
    west.train(2)
    east.train(5)
    host, run = east.listen(), east.view().run_id
    view = peek(east.base, run)
    age = age_of(view)
    assert age is not None
    asker = Asker(START, SECRET, None, 20.0)
    assert fetch_memory(west.view(), west.base, [host], asker, than=age) is None
    assert west.step() == 2
    older = (age[0], age[1] - 1, age[2])
    assert fetch_memory(west.view(), west.base, [host], asker, than=older) is not None
    assert west.step() == 5


def test_an_abandoned_future_is_never_brought(three: list[Site], caplog: pytest.LogCaptureFixture) -> None:
    """East was cut off at step 9. The job has continued elsewhere, from the store, and has committed step 4."""
    east, west, north = three
    east.train(3, durable=True)
    east.train(9)
    north.train(4, durable=True)
    assert west.fetch(east.listen()) is None
    assert "no longer belongs to this store" in caplog.text
    assert west.step() == -1
    assert not west.place.exists()
    west.train(4, durable=True)
    assert west.fetch(east.candidate, north.listen()) is None  # north's is over, too
    assert west.step() == 4


def test_a_replica_whose_line_is_behind_the_store_is_brought_and_believed(three: list[Site]) -> None:
    """Records of its own epoch were created since the copy was made: the next session still finds it to be kin."""
    east, west, north = three

    def copy() -> None:
        shutil.copytree(east.place, north.place)
        write_owner(north.place, Owner("east", "22" * 16, 1))
        arena = Arena.share(north.place, run_id=north.view().run_id)
        assert arena is not None
        arena.take_over(0)

    east.train(3, durable=True, copied=copy)
    behind = Arena.share(north.place, run_id=north.view().run_id)
    assert behind is not None
    noted, there = behind.line, north.view().line()
    assert noted is not None
    assert there is not None
    assert noted.own_k < there.k
    found = west.fetch(north.listen())
    assert found is not None
    arena = take(west.place, west.view())
    assert arena is not None
    assert arena.replica_of == "north"
    arena.close()


def test_a_run_whose_process_lives_is_not_served(three: list[Site]) -> None:
    east, west, _ = three
    east.train(5)
    host = east.listen()
    run = east.view().run_id
    arena = Arena.open_existing(east.place, run_id=run)
    assert arena is not None
    arena.take_over()  # this process
    assert west.fetch(host) is None
    arena.close()  # it still lives: it only has no lock
    assert west.fetch(host) is None
    arena.take_over(0)
    held = Arena.open_existing(east.place, run_id=run)
    assert held is not None
    assert west.fetch(host) is None  # its lock is held, whatever the header says
    held.close()
    assert west.fetch(host) is not None


def test_nothing_is_brought_over_a_live_process_of_this_host(three: list[Site]) -> None:
    east, west, _ = three
    west.train(2)
    shutil.copytree(west.place, east.place)
    east.train(5)
    host = east.listen()
    arena = Arena.open_existing(west.place, run_id=west.view().run_id)
    assert arena is not None
    assert west.fetch(host) is None  # locked
    arena.take_over()
    assert west.fetch(host) is None  # alive
    arena.close()
    assert west.step() == 2


# -- who may ask, and who is believed ------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["there", "nowhere"])
def test_memory_of_a_live_process_is_not_fetched_from_its_replica(
    three: list[Site], caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """It has the store's lock, so this start is a mistake. Each one would fetch everything, and interrupt the copy."""
    _, west, north = three
    west.train(5)
    write_owner(west.place, Owner("liar", "22" * 16, 1))
    before = west.files()

    def answer(channel: Channel, kind: Kind) -> None:
        channel.send(encode(kind, {"found": False, "alive": where == "there"}))

    with Liar(answer) as liar:
        found = north.fetch(liar, west.listen())
    assert west.files() == before
    if where == "there":
        assert found is None
        assert north.files() == {}
        assert "its process lives on liar" in caplog.text
    else:
        assert found is not None


def test_with_tls(three: list[Site], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    east, west, _ = three
    authority, other = Authority(tmp_path), Authority(tmp_path / "west", "other")
    east.train(5)
    host = east.listen(tls=Tls(authority.host("east")))
    assert west.fetch(host) is None
    assert west.fetch(host, tls=Tls(other.host("west"))) is None
    assert "certificate" in caplog.text
    assert west.fetch(host, tls=Tls(authority.host("west"))) is not None
    assert west.step() == 5


def test_two_hosts_fetch_the_same_at_once(three: list[Site], monkeypatch: pytest.MonkeyPatch) -> None:
    east, west, north = three
    east.train(5)
    host = east.listen()
    both = threading.Barrier(2, timeout=60.0)
    read = Outgoing.read

    def together(self: Outgoing, at: int, size: int) -> Any:
        both.wait()
        return read(self, at, size)

    monkeypatch.setattr(Outgoing, "read", together)
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda site=site: found.append(site.fetch(host))) for site in (west, north)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.host for one in found] == ["east", "east"]
    assert (west.step(), north.step()) == (5, 5)
    again = Arena.open_existing(east.place, run_id=east.view().run_id)  # the lock is free
    assert again is not None
    again.close()
