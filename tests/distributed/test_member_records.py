"""Test how the hosts of members find and recognize each other, with real daemons: secrets, records, and warnings."""

from __future__ import annotations

import socket
import time
from contextlib import closing
from pathlib import Path

import pytest

import scarctl
from scarctl.errors import UsageError
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
