"""Test how the hosts of members find and recognize each other, with real daemons: secrets, records, and warnings."""

from __future__ import annotations

import signal
import socket
import time
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest

import scarctl
from scarctl.daemon.status import RunStatus, part_of
from scarctl.errors import UsageError
from scarctl.ops.survey import survey
from scarctl.store import Store
from scarctl.store.format import HOSTS
from scarctl.store.hosts import HostRecord, host_path
from tests.support.copied_member import Hosts
from tests.support.member import state_of
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.leaves_arena, pytest.mark.timeout(300)]


def put(hosts: Hosts, place: str, data: bytes) -> None:
    folder = Path(hosts.store) / HOSTS
    folder.mkdir(parents=True, exist_ok=True)
    (Path(hosts.store) / host_path(place)).write_bytes(data)


def bound(listener: socket.socket, address: str, port: int) -> bool:
    try:
        listener.bind((address, port))
    except OSError:
        return False
    return True


def test_without_a_secret_the_command_that_makes_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="need the file of a secret") as caught:
        scarctl.attach(
            state_of(0),
            store=tmp_path / "store",
            member=(0, 2),
            settings=scarctl.Settings(peers=1, daemon=True),
        )
    assert "openssl rand -hex 32 > peer-secret" in str(caught.value)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("content", ["", "short", None])
def test_a_file_without_a_good_secret_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_text(content)
        path.chmod(0o600)
    for peers in (0, 1):
        with pytest.raises(UsageError, match="secret's file"):
            scarctl.attach(
                state_of(0),
                store=tmp_path / "store",
                member=(0, 2),
                settings=scarctl.Settings(peers=peers, daemon=True if peers else None, peer_secret_file=path),
            )
    assert not (tmp_path / "store").exists()


def test_a_host_with_another_secret_gets_no_copy(alone: Hosts, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("another-0123456789abcdef-0123456789abcdef")
    other.chmod(0o600)
    alone.start(0, "east")
    alone.start(1, "west", peer_secret_file=str(other))
    wait_until(lambda: any("does not have this job's secret" in line for line in alone.warned(0)), 60)
    wait_until(lambda: any("does not have this job's secret" in line for line in alone.warned(1)), 60)
    assert alone.copies_on("west") == alone.copies_on("east") == []
    alone.lose("east", 0)
    assert "peer" not in alone.start(0, "north", peer_secret_file=str(other))["tiers"]
    text = "".join(str(line) for number in (0, 1) for line in alone.told(number))
    assert "0123456789abcdef-0123456789abcdef" not in text


def test_what_hosts_write_about_themselves(two: Hosts) -> None:
    found = two.records()
    assert found.keys() == {"east", "west"}
    assert found["east"].place != found["west"].place
    assert {record.address for record in found.values()} == {"127.0.0.1"}
    wait_until(lambda: two.records()["east"].to == (found["west"].place,))
    before = found["east"].written
    wait_until(lambda: two.records()["east"].written > before)
    # A record that is being written has another name.
    assert len(list((Path(two.store) / HOSTS).glob("*.json"))) == 2


@pytest.mark.long
def test_several_members_of_one_host_write_one_record(alone: Hosts) -> None:
    alone.count = 3
    for number, home in enumerate(("east", "east", "west")):
        alone.start(number, home)
    for number, home in enumerate(("east", "east", "west")):
        alone.until_copied(number, home)
    assert alone.records().keys() == {"east", "west"}
    assert len(alone.copies_on("west")) == 2
    assert len(alone.copies_on("east")) == 1


@pytest.mark.long
def test_hostile_records_cost_nothing(alone: Hosts) -> None:
    """Garbage, a huge file, an address that accepts and never answers, one that is gone, and one of nobody."""
    Store.create(alone.store, rows={"rows": 1})
    with closing(socket.create_server(("127.0.0.1", 0))) as mute, closing(socket.socket()) as gone:
        gone.bind(("127.0.0.1", 0))
        ports = mute.getsockname()[1], gone.getsockname()[1]
        now = int(time.time())
        for number, (address, port) in enumerate(
            [("127.0.0.1", ports[0]), ("127.0.0.1", ports[1]), ("192.0.2.7", 9)]
        ):
            place = f"{number:016x}"
            put(alone, place, HostRecord(place, f"evil {number}", "", address, port, False, now).data)
        put(alone, "a" * 16, b"\xff" * 100)
        put(alone, "b" * 16, b"[" * (1 << 20))
        put(alone, "c" * 16, b'{"kind":"host"}')
        begun = alone.start(0, "east")
        assert begun == {"step": 0, "consistent": True, "tiers": {}, "torn": 0}
        alone.start(1, "west")
        # Those that do not answer are given up after some time, and asked last from then on.
        alone.until_copied(0, "east")
        alone.until_copied(1, "west")
        assert alone.end(0) == alone.end(1) == 0


@pytest.mark.long
def test_a_record_of_a_host_that_is_gone_does_not_hinder(two: Hosts) -> None:
    """Its record is there for a day, and so are replicas on other hosts."""
    before = two.records()["west"]
    two.lose("west", 1)
    wait_until(lambda: any("not kept up to date" in line for line in two.warned(0)), 60)
    assert two.start(1, "south")["tiers"].keys() <= {"peer", "store"}
    assert two.records()["west"].port == before.port
    two.until_copied(1, "south")
    two.until_copied(0, "east")
    wait_until(lambda: "south" in str(two.run_of(0, "east").get("peers")), 120)
    two.until_copied(0, "east")


@pytest.mark.long
def test_the_record_follows_a_daemon_that_is_replaced(two: Hosts) -> None:
    """Another process has taken its port meanwhile."""
    before = two.records()["west"]
    two.programs[1].send_signal(signal.SIGSTOP)
    two.kill_daemon("west")
    with closing(socket.socket()) as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        wait_until(lambda: bound(taken, before.address, before.port))  # once the last connection is closed
        taken.listen()
        two.programs[1].send_signal(signal.SIGCONT)
        wait_until(lambda: two.records()["west"].port != before.port)
        two.order(0, "stop store")
        head = two.copy(0)
    two.lose("east", 0)
    found = two.start(0, "north")
    assert found["tiers"].keys() == {"peer"}
    assert found["step"] >= head


@pytest.mark.long
def test_the_store_goes_away_and_comes_back(two: Hosts) -> None:
    """Training and copies continue. A caveat says that this host cannot be found."""
    store, away = Path(two.store), Path(two.store).with_name("away")
    store.rename(away)
    wait_until(lambda: any(kind == "peer-record" for kind, _ in two.order(0, "caveats")["answer"]))
    two.until_head(0, "east")
    two.copy(0)
    assert not store.exists(), "nothing makes the folder again"
    assert len([kind for kind, _ in two.order(0, "caveats")["answer"] if "peer" in kind]) == 1
    away.rename(store)
    wait_until(lambda: not any("peer" in kind for kind, _ in two.order(0, "caveats")["answer"]))
    assert two.end(0) == two.end(1) == 0


@pytest.mark.long
def test_without_another_host_a_warning_says_so_until_one_has_a_copy(alone: Hosts) -> None:
    alone.options["seconds"] |= {"_ALONE": 1.0}
    alone.start(0, "east")
    wait_until(lambda: alone.run_of(0, "east").get("peers") == ["no host yet: absent"])
    assert part_of(cast(RunStatus, alone.run_of(0, "east"))) == "member 0"
    text = "peers=1, but no other host can yet keep copies of this host's memory"
    wait_until(lambda: any(line.startswith(text) for line in alone.warned(0)))
    (caveat,) = alone.order(0, "caveats")["answer"]
    assert (caveat[0], caveat[2]) == ("peers", False)
    assert caveat[1].startswith(text)
    alone.start(1, "west")
    alone.until_copied(0, "east")
    wait_until(lambda: alone.order(0, "caveats")["answer"] == [])
    assert sum(line.startswith(text) for line in alone.warned(0)) == 1


@pytest.mark.long
def test_inspect_and_status_name_the_hosts(two: Hosts) -> None:
    def copies(home: str) -> list[Any]:
        lines = survey(Store.open(two.store), str(two.home(home))).ranks
        return [(line.replica_of or "", list(line.copies)) for line in lines]

    # Both members commit meanwhile, and their stores write indexes, which end the records before them.
    for _ in range(15):
        east, west = copies("east"), copies("west")
        assert "west" in str(east[0][1])
        assert "east" in str(west[1][1])
        assert ["west" in east[1][0], "east" in west[0][0]] == [True, True]


@pytest.mark.long
def test_a_forked_child_has_no_thread_and_changes_nothing(two: Hosts) -> None:
    names = two.order(0, "fork")["answer"]
    assert "scarctl-hosts" not in names
    two.copy(0)
    assert two.run_of(0, "east")["peers"]


@pytest.mark.long
def test_a_run_that_ends_leaves_no_copy(two: Hosts) -> None:
    assert two.end(0) == two.end(1) == 0
    wait_until(lambda: two.copies_on("east") == two.copies_on("west") == [])
