"""Test one host's looks at the records of others: the test sets the clocks, and a daemon notes what it is asked for."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from scarctl.config import SessionSettings
from scarctl.daemon.saver import DaemonSaver
from scarctl.distributed import meeting as module
from scarctl.distributed import presence
from scarctl.distributed.credentials import Credentials
from scarctl.distributed.host_address import digest_of_place, place_of
from scarctl.distributed.meeting import Meeting
from scarctl.distributed.memory_search import search_memory
from scarctl.errors import Contention, ScarError
from scarctl.peers.link import REPLACED_AFTER
from scarctl.state.caveats import Caveats
from scarctl.store import Store
from scarctl.store.format import HOSTS
from scarctl.store.hosts import GONE, STALE, HostRecord, host_path, read_hosts, write_host
from tests.support.waiting import wait_until

NOW = 1_700_000_000.0
A, B, C = "a" * 16, "b" * 16, "c" * 16


def record(place: str, port: int, *, age: float = 0.0, **other: Any) -> HostRecord:
    known = HostRecord(place, f"host {place[0]}", "", "127.0.0.1", port, False, int(NOW - age))
    return replace(known, **other)


@dataclass
class NotedDaemon:
    """Answers as a session's saver does, and notes what it is asked for."""

    port: int = 4000
    links_now: list[dict[str, Any]] = field(default_factory=list)
    followed: list[list[int]] = field(default_factory=list)
    """Ports of the candidates of each request."""
    admitted: list[str] = field(default_factory=list)
    refusal: ScarError | None = None

    def admit(
        self, start: str, secret: str, address: str, tls: object, rate: float | None, lasting: bool
    ) -> int:
        assert lasting
        if self.refusal is not None:
            raise self.refusal
        self.admitted.append(address)
        return self.port

    def links(self) -> list[dict[str, Any]]:
        return self.links_now

    def follow(self, host: str, peers: list[dict[str, Any]], copies: int, rate: object, process: str) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.followed.append([peer["port"] for peer in peers])
        if not any(link["port"] == peers[0]["port"] for link in self.links_now if peers):
            self.has(*(peer["port"] for peer in peers[:copies]), state="connecting", complete=False)

    def has(self, *ports: int, state: str = "following", complete: bool = True) -> None:
        self.links_now = [
            {"address": "127.0.0.1", "port": port, "state": state, "complete": complete} for port in ports
        ]


@dataclass
class Table:
    """One host's meeting, its daemon, and its clocks."""

    store: Store
    meeting: Meeting
    daemon: NotedDaemon
    caveats: Caveats
    place: str
    passed: float = 0.0

    def look(self, after: float = 0.0) -> float:
        self.passed += after
        return self.meeting.look()

    def put(self, *records: HostRecord) -> None:
        self.store.blobs.prepare(HOSTS)
        for one in records:
            write_host(self.store, one)

    def meet(self, *records: HostRecord) -> None:
        """Let these hosts be there, and look until the daemon has been asked."""
        self.put(*records)
        self.look()
        self.look(1.0)

    @property
    def own(self) -> HostRecord:
        return read_hosts(self.store)[self.place]


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    yield from made(tmp_path)


def made(folder: Path, **options: Any) -> Iterator[Table]:
    store = Store.create(folder / "store")
    known: dict[str, Any] = {"peers": 1, "peer_address": "127.0.0.1", "arena_dir": str(folder)}
    settings = SessionSettings(store=str(folder / "store"), **known | options)
    daemon, caveats = NotedDaemon(), Caveats()
    table = Table(store, cast(Any, None), daemon, caveats, digest_of_place(place_of(settings)))
    table.meeting = Meeting(
        store,
        cast(DaemonSaver, daemon),
        settings,
        Credentials(store.id, "ab" * 32, None),
        "cd" * 16,
        caveats,
        clock=lambda: NOW + table.passed,
        now=lambda: table.passed,
    )
    yield table
    table.meeting.close()
    store.close()


def test_the_first_look_only_writes_so_that_hosts_that_start_together_meet(table: Table) -> None:
    table.put(record(A, 1), record(B, 2))
    assert table.look() <= module._FIRST
    assert table.daemon.followed == []
    assert (table.own.port, table.own.to, table.own.written) == (4000, (), int(NOW))
    table.look(1.0)
    assert len(table.daemon.followed) == 1
    assert sorted(table.daemon.followed[0]) == [1, 2]
    (chosen,) = table.own.to
    assert {A: 1, B: 2}[chosen] == table.daemon.followed[0][0]


def test_a_second_member_of_a_host_goes_where_the_first_one_went(table: Table) -> None:
    table.put(record(A, 1), record(B, 2), record(table.place, 4000, to=(B,)))
    table.look()
    assert table.daemon.followed[0][0] == 2


def test_it_asks_again_only_if_the_choice_changes(table: Table) -> None:
    table.meet(record(A, 1))
    table.daemon.has(1)
    assert module._LACKING < table.look(1.0) <= module._USUAL
    table.put(record(B, 2), record(C, 3, to=(B,)))
    for _ in range(5):
        table.look(60.0)
        table.put(*(record(p, n, age=-table.passed) for p, n in ((A, 1), (B, 2), (C, 3))))
    first, second = table.daemon.followed
    assert (first, second[0]) == ([1], 1), "a copy that is kept stays, whoever joins"
    assert sorted(second) == [1, 2, 3], "and the others are named once"
    table.put(record(A, 7, age=-table.passed))  # its daemon was replaced
    table.daemon.has()
    table.look(1.0)
    assert [ports[0] for ports in table.daemon.followed] == [1, 1, 7]


def test_pauses_grow_while_copies_are_lacking(table: Table) -> None:
    pauses = [table.look(1.0) for _ in range(8)]
    assert all(pause <= module._LACKING for pause in pauses)
    assert pauses[-1] > 0.7 * module._LACKING
    assert table.daemon.followed == [[]], "the daemon shows that there is no other host"


def test_its_record_is_written_about_once_a_minute(table: Table) -> None:
    table.put(record(A, 1))
    table.daemon.has(1)
    times = []
    for _ in range(600):
        table.look(1.0)
        times.append(table.own.written)
    assert 10 <= len(set(times)) <= 25


def test_a_removed_record_is_written_again(table: Table) -> None:
    table.look()
    table.store.blobs.delete(host_path(table.place))
    table.look(1.0)
    assert table.own.port == 4000


def test_a_connected_host_stays_although_its_record_is_gone(table: Table) -> None:
    """Somebody with a wrong clock may have removed it."""
    table.meet(record(A, 1))
    table.daemon.has(1)
    table.look(1.0)
    table.store.blobs.delete(host_path(A))
    table.put(record(B, 2))
    table.look(60.0)
    assert table.daemon.followed == [[1], [1, 2]]
    table.daemon.has()
    table.look(1.0)
    table.look(1.0)
    assert table.daemon.followed[-1] == [2]


def test_a_host_that_does_not_answer_is_asked_last_for_some_time(table: Table) -> None:
    table.meet(record(A, 1), record(B, 2))
    first, second = table.daemon.followed[0]
    table.look(module._TRIED / 2)
    assert len(table.daemon.followed) == 1
    table.look(module._TRIED)
    assert table.daemon.followed[-1] == [second, first]
    table.daemon.has(second)
    for _ in range(4):
        table.look(60.0)
    assert table.daemon.followed[-1] == [second, first]


def test_a_host_that_had_a_copy_is_waited_for(table: Table) -> None:
    table.meet(record(A, 1), record(B, 2))
    first, second = table.daemon.followed[0]
    table.daemon.has(first)
    table.look(1.0)
    table.daemon.has(first, state="lost")
    table.look(1.0)
    table.look(REPLACED_AFTER - 5)
    assert len(table.daemon.followed) == 1, "its copy is there when it comes back"
    table.look(10.0)
    assert table.daemon.followed[-1] == [second, first]


def test_a_copy_under_way_is_not_interrupted(table: Table) -> None:
    table.meet(record(A, 1))
    table.daemon.has(1, state="full", complete=False)
    table.put(record(B, 2), record(C, 3))
    for _ in range(10):
        table.look(60.0)
        table.put(*(record(p, n, age=-table.passed) for p, n in ((A, 1), (B, 2), (C, 3))))
    assert {ports[0] for ports in table.daemon.followed} == {1}


def test_a_run_that_continued_elsewhere_asks_for_nothing(table: Table) -> None:
    table.meet(record(A, 1))
    table.daemon.has(1, state="fenced")
    table.put(record(B, 2))
    for _ in range(3):
        table.look(60.0)
    assert table.daemon.followed == [[1]]
    (caveat,) = table.caveats
    assert "this member has continued elsewhere" in caveat.message, "it is not protected any more"


def test_a_daemon_that_lost_its_links_is_asked_again(table: Table) -> None:
    """As after one that could not be told to follow."""
    table.meet(record(A, 1))
    table.daemon.has()
    table.look(1.0)
    assert table.daemon.followed == [[1], [1]]


def test_an_evacuation_puts_changes_off(table: Table) -> None:
    table.put(record(A, 1))
    table.look()
    table.daemon.refusal = None
    original = table.daemon.follow

    def refuse(*_: Any) -> None:
        raise Contention("its memory is evacuated")

    table.daemon.follow = refuse  # type: ignore[method-assign, assignment]
    table.look(1.0)
    assert table.daemon.followed == []
    table.daemon.follow = original  # type: ignore[method-assign]
    table.look(1.0)
    assert table.daemon.followed == [[1]]


def test_records_of_hosts_that_are_gone_are_removed(table: Table) -> None:
    table.put(record(A, 1, age=GONE + 10), record(B, 2, age=STALE + 10), record(C, 3))
    table.look()
    assert read_hosts(table.store).keys() == {B, C, table.place}
    table.look(1.0)
    assert table.daemon.followed == [[3, 2]], "one that wrote long ago is asked last"


def test_this_hosts_own_daemon_is_no_candidate(table: Table) -> None:
    """A record of another machine with the same local address and port, or of an earlier boot of this one."""
    table.look()
    table.put(record(A, 4000))
    table.look(1.0)
    table.look(1.0)
    assert table.daemon.followed == [[]]


def test_a_host_with_tls_is_asked_last_without_it(table: Table) -> None:
    table.meet(record(A, 1, tls=True), record(B, 2))
    assert table.daemon.followed == [[2, 1]]


def test_a_store_that_is_away_changes_nothing(table: Table, caplog: pytest.LogCaptureFixture) -> None:
    table.meet(record(A, 1))
    table.daemon.has(1)
    root, away = table.store.root, table.store.root.with_name("away")
    root.rename(away)
    for empty in (False, True):  # gone, or an empty folder where it was mounted
        if empty:
            root.mkdir()
        for _ in range(3):
            table.look(100.0)
    assert list(root.iterdir()) == []
    assert table.daemon.followed == [[1]]
    (caveat,) = table.caveats
    assert caveat.kind == "peer-record"
    assert sum("cannot find this one" in text for text in caplog.messages) <= 2
    root.rmdir()
    away.rename(root)
    table.look(1.0)
    assert list(table.caveats) == []
    assert table.own.written == int(NOW + table.passed)


def test_a_look_that_fails_unexpectedly_does_not_end_the_thread(
    table: Table, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LACKING", 0.01)
    monkeypatch.setattr(module, "_FIRST", 0.01)
    monkeypatch.setattr(presence, "_FAULT", 0.01)
    failed: list[int] = []

    def links() -> list[dict[str, Any]]:
        if len(failed) < 3:
            failed.append(1)
            raise RuntimeError("unforeseen")
        return []

    table.daemon.links = links  # type: ignore[method-assign]
    table.put(record(A, 1))
    table.meeting.start()
    wait_until(lambda: table.daemon.followed)
    table.meeting.close()
    assert not table.meeting._thread.is_alive()
    assert table.place in read_hosts(table.store), "others may come for the memory"
    assert sum("failed unexpectedly" in text for text in caplog.messages) == 3


def test_the_secret_is_not_shown(table: Table, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    table.look()
    table.look(1.0)
    assert "ab" * 32 not in caplog.text + repr(table.meeting._credentials)


# -- addresses ----------------------------------------------------------------------------------------------------


def test_an_address_of_the_internet_is_warned_of(
    table: Table, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    object.__setattr__(table.meeting._settings, "peer_address", "8.8.8.8")
    table.look()
    table.look(1.0)
    assert sum("an address of the internet" in text for text in caplog.messages) == 1


def test_a_local_address_is_warned_of_once_there_is_another_machine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each host of a network without a default route, whose names are local, finds only its loopback address."""
    monkeypatch.setattr(module, "address_among", lambda others: min(others, default="127.0.0.1"))
    for table in made(tmp_path, peer_address=None):
        here = f"{socket.gethostname()}:folder"
        table.meet(record(A, 1, host=here))
        assert not list(table.caveats), "a host on this machine is reached"
        table.put(record(B, 2, host="node7"))
        for _ in range(3):
            table.look(20.0)
        (caveat,) = (one for one in table.caveats if one.kind == "peer-address")
        assert "listens at 127.0.0.1, which node7 cannot reach" in caveat.message
        assert "SCARCTL_PEER_ADDRESS" in caveat.message
        assert caplog.messages.count(caveat.message) == 1
        table.put(*(record(place, 1, host="node7", address="10.0.0.7") for place in (A, B)))
        table.look(20.0)
        assert table.daemon.admitted[-1] == "10.0.0.7"
        assert "peer-address" not in [one.kind for one in table.caveats]


# -- searching ----------------------------------------------------------------------------------------------------


def test_a_search_that_fails_costs_a_warning(
    table: Table, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = SessionSettings(store=str(tmp_path / "store"), arena_dir=str(tmp_path))
    given = Credentials(table.store.id, "ab" * 32, ["none.pem", "none.key", "none.ca"])
    table.put(record(A, 1, written=int(time.time())))
    assert search_memory([table.store.of_shard(0)], settings, given) == 0
    assert "other hosts are not searched" in caplog.text
    assert search_memory([table.store.of_shard(0)], settings, replace(given, files=None)) == 0
