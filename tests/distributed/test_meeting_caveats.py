"""Test what one host's looks report: copies that are lacking, or that the same failure takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from scarctl.distributed.credentials import disk_of
from scarctl.distributed.host_address import machine
from tests.distributed.test_meeting import A, B, Table, made, record, table

__all__ = ["table"]


def disk_sentence(table: Table) -> str:
    """Return what a warning adds if only this machine has the store."""
    if not (disk := disk_of(table.store)):
        return ""
    return (
        f". The store is on a disk of this machine ({disk}): hosts of other machines are not met. If they mount it "
        "from here, mount it here in the same way"
    )


def test_of_a_shared_store_the_warning_names_no_disk(table: Table) -> None:
    table.meeting._disk = ""
    for _ in range(10):
        table.look(30.0)
    (caveat,) = table.caveats
    assert caveat.message == "peers=1, but no other host can yet keep copies of this host's memory"


def test_too_few_hosts_are_a_caveat_after_a_minute(table: Table, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(5):
        table.look(10.0)
    assert list(table.caveats) == []
    for _ in range(5):
        table.look(30.0)
    (caveat,) = table.caveats
    text = "peers=1, but no other host can yet keep copies of this host's memory"
    assert caveat.message.removeprefix(text) == disk_sentence(table)
    assert caplog.messages.count(caveat.message) == 1
    table.put(record(A, 1, age=-table.passed))
    table.look(1.0)
    assert list(table.caveats) == [caveat], "nothing is protected yet"
    table.daemon.has(1)
    table.look(1.0)
    assert list(table.caveats) == []


def test_hosts_that_keep_no_copy_are_a_caveat_after_a_minute(table: Table) -> None:
    """They are recorded, and there are enough of them, but each refuses without a word, or never answers."""
    table.put(record(A, 1), record(B, 2))
    for _ in range(5):
        table.look(10.0)
    assert list(table.caveats) == []
    for _ in range(5):
        table.look(20.0)
        table.daemon.has()
    (caveat,) = table.caveats
    text = "peers=1, but of 2 other hosts none keeps a copy of this host's memory: no answer, or a refusal"
    assert caveat.message.removeprefix(text) == disk_sentence(table)
    table.daemon.has(1, state="full", complete=False)
    table.look(1.0)
    assert list(table.caveats) == [caveat]
    table.daemon.has(1)
    table.look(1.0)
    assert list(table.caveats) == []
    table.look(100.0)
    assert list(table.caveats) == []


def test_containers_of_one_machine_are_used_last_and_are_a_caveat(table: Table) -> None:
    """They are hosts of their own: the machine's loss takes all of them."""
    object.__setattr__(table.meeting._settings, "peer_address", "10.0.0.7")
    near = record(A, 1, domain=machine(), address="10.0.0.8")
    table.meet(near)
    table.daemon.links_now = [{"address": "10.0.0.8", "port": 1, "state": "following", "complete": True}]
    table.look(1.0)
    (caveat,) = table.caveats
    assert caveat.kind == "peer-machine"
    table.put(record(B, 2, address="10.0.0.9"))
    table.daemon.links_now = []
    table.look(1.0)
    table.look(1.0)
    assert table.daemon.followed[-1][0] == 2
    table.daemon.links_now = [{"address": "10.0.0.9", "port": 2, "state": "following", "complete": True}]
    table.look(1.0)
    assert list(table.caveats) == []
    assert table.own.domain == machine()


def test_one_of_two_hosts_is_too_few(tmp_path: Path) -> None:
    for seat in made(tmp_path, peers=2):
        seat.meet(record(A, 1))
        seat.daemon.has(1)
        seat.look(70.0)
        (caveat,) = seat.caveats
        text = "peers=2, but only 1 other host can keep copies of this host's memory"
        assert caveat.message.removeprefix(text) == disk_sentence(seat)
