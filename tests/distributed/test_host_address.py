"""Test the address at which a host listens, and the order in which hosts are searched for memory."""

from __future__ import annotations

from dataclasses import replace

from scarctl.distributed.host_address import address_among, is_local, reaching
from scarctl.distributed.memory_search import candidates_of
from scarctl.store.hosts import HostRecord


def test_the_address_is_local_only_if_all_are_on_this_machine() -> None:
    assert address_among(["127.0.0.1", "127.0.0.1"]) == "127.0.0.1"
    alone = address_among([])
    if not is_local(alone):  # this machine has a network
        assert address_among(["127.0.0.1", alone]) == alone
    assert is_local(reaching("127.0.0.1"))
    assert is_local("::1")


def test_hosts_are_searched_newest_first_and_this_one_never() -> None:
    now = 1_700_000_000
    records = [
        HostRecord(place * 16, place, "", "127.0.0.1", port, False, now - age)
        for place, port, age in (("a", 1, 50), ("b", 2, 0), ("c", 3, 700))
    ]
    found = candidates_of(records, "c" * 16, now)
    assert [one.port for one in found] == [2, 1]
    many = [replace(records[0], place=f"{number:016x}", port=1 + number) for number in range(200)]
    assert len(candidates_of([*many, records[1]], "c" * 16, now)) == 128
    assert candidates_of([*many, records[1]], "c" * 16, now)[0].port == 2
