"""Test the record of one host of ranks: the test sets the clocks, and a daemon notes what it is asked for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import cast

import pytest

from scarctl.config import SessionSettings
from scarctl.daemon.saver import DaemonSaver
from scarctl.distributed.credentials import Credentials
from scarctl.distributed.host_address import digest_of_place, place_of
from scarctl.distributed.memory_search import recorded_hosts
from scarctl.distributed.presence import Presence
from scarctl.errors import Unavailable
from scarctl.state.caveats import Caveats
from scarctl.store import Store
from scarctl.store.hosts import GONE, HostRecord, read_hosts, write_host
from tests.distributed.test_meeting import NOW, NotedDaemon, record
from tests.support.waiting import wait_until


class Rank:
    """The first rank of a host, and its clocks."""

    def __init__(self, folder: Path) -> None:
        self.store = Store.create(folder / "store")
        settings = SessionSettings(store=str(folder / "store"), peers=1, arena_dir=str(folder))
        self.place, self.passed = digest_of_place(place_of(settings)), 0.0
        self.daemon, self.caveats = NotedDaemon(), Caveats()
        self.presence = Presence(
            self.store.of_shard(0),
            cast(DaemonSaver, self.daemon),
            settings,
            Credentials(self.store.id, "ab" * 32, None),
            self.caveats,
            "10.0.0.7",
            ("a" * 16,),
            clock=lambda: NOW + self.passed,
            now=lambda: self.passed,
        )

    def look(self, after: float = 60.0) -> None:
        self.passed += after
        assert 45 <= self.presence.look() <= 60

    @property
    def own(self) -> HostRecord:
        return read_hosts(self.store)[self.place]


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path)


def test_the_record_is_written_again_and_again(rank: Rank) -> None:
    rank.look(0.0)
    own = rank.own
    assert (own.address, own.port, own.to, own.written) == ("10.0.0.7", 4000, ("a" * 16,), NOW)
    for _ in range(3):
        rank.look()
        assert rank.own.written == NOW + rank.passed
    assert rank.daemon.admitted == ["10.0.0.7"] * 4
    assert list(rank.caveats) == []


def test_another_daemon_has_another_port(rank: Rank) -> None:
    rank.look(0.0)
    rank.daemon.port = 4001
    rank.look()
    assert rank.own.port == 4001


def test_a_daemon_that_cannot_listen_is_a_caveat_until_it_can(rank: Rank) -> None:
    rank.daemon.refusal = Unavailable("the daemon has ended")
    rank.look(0.0)
    (caveat,) = rank.caveats
    assert caveat.kind == "peers"
    assert "no copy on another host, and keeps none: the daemon has ended" in caveat.message
    assert read_hosts(rank.store) == {}
    rank.daemon.refusal = None
    rank.look()
    assert list(rank.caveats) == []
    assert rank.own.port == 4000


def test_a_store_that_is_away_is_a_caveat_until_it_is_back(rank: Rank, tmp_path: Path) -> None:
    (tmp_path / "store").rename(tmp_path / "away")
    rank.look(0.0)
    (caveat,) = rank.caveats
    assert caveat.kind == "peer-record"
    assert not (tmp_path / "store").exists(), "no folder is made in its place"
    (tmp_path / "away").rename(tmp_path / "store")
    rank.look()
    assert list(rank.caveats) == []
    assert rank.own.port == 4000


def test_it_ends_when_it_is_asked_to(rank: Rank) -> None:
    rank.presence.start()
    wait_until(lambda: read_hosts(rank.store))
    rank.presence.close()
    assert not rank.presence._thread.is_alive()
    assert rank.place in read_hosts(rank.store), "others may come for the memory"


def test_hosts_of_the_job_are_not_outside(rank: Rank) -> None:
    rank.look(time.time() - NOW)
    for place, port, age in (
        ("b" * 16, 2, 0.0),
        ("c" * 16, 3, 60.0),
        ("d" * 16, 4, 30.0),
        ("e" * 16, 5, 2 * GONE),
    ):
        write_host(rank.store, record(place, port, written=int(time.time() - age)))
    found = recorded_hosts(rank.store, {rank.place, "b" * 16})
    assert [one.port for one in found] == [4, 3], "the newest record first"
    assert "e" * 16 not in read_hosts(rank.store), "what is too old is removed"
