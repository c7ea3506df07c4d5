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
    for port in (4000, 4000, 4001):
        rank.daemon.port = port  # that of another daemon, in the end
        rank.look()
        assert (rank.own.written, rank.own.port) == (NOW + rank.passed, port)
    assert rank.daemon.admitted == ["10.0.0.7"] * 4
    assert list(rank.caveats) == []


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
