"""Test which records of hosts are read again, and when."""

from __future__ import annotations

from pathlib import Path

from scarctl.distributed.known_hosts import KnownHosts
from scarctl.store import Store
from scarctl.store.format import HOSTS
from scarctl.store.hosts import HostRecord, read_hosts, write_host

NOW = 1_700_000_000


def put(store: Store, **ports: int) -> None:
    for name, port in ports.items():
        write_host(store, HostRecord(name * 16, name, "", "127.0.0.1", port, False, NOW))


def test_records_that_do_not_concern_this_host_are_read_now_and_then(tmp_path: Path) -> None:
    """While all copies are kept, one listing shows what has changed."""
    store = Store.create(tmp_path / "store")
    store.blobs.prepare(HOSTS)
    passed = [0.0]
    known = KnownHosts(store, "f" * 16, lambda: NOW + passed[0], lambda: passed[0])
    put(store, a=1, b=2)
    known.read((), (), all_of_them=True)
    put(store, a=11, b=12)
    passed[0] = 60.0
    known.read({"a" * 16}, (), all_of_them=False)
    assert {one.port for one in known.records.values()} == {11, 2}
    passed[0] = 301.0
    known.read({"a" * 16}, (), all_of_them=False)
    assert {one.port for one in known.records.values()} == {11, 12}
    put(store, b=22)
    known.read((), (), all_of_them=True)
    assert {one.port for one in known.records.values()} == {11, 22}
    known.close()


def test_two_processes_of_a_host_do_not_take_turns_with_its_choice(tmp_path: Path) -> None:
    """Other hosts place their copies by it: each turn would have some of them send everything to another host."""
    store = Store.create(tmp_path / "store")
    passed = [0.0]
    own = "f" * 16
    both = [KnownHosts(store, own, lambda: NOW + passed[0], lambda: passed[0]) for _ in range(2)]

    def look(number: int, to: str) -> tuple[str, ...]:
        known = both[number]
        known.read({own}, (), all_of_them=True)
        known.write(HostRecord(own, "f", "", "127.0.0.1", 1, False, int(NOW + passed[0]), (to * 16,)))
        return read_hosts(store)[own].to

    assert look(0, "a") == ("a" * 16,)
    assert look(1, "b") == ("b" * 16,)
    for passed[0] in (100.0, 200.0, 300.0):
        assert look(0, "a") == look(1, "b") == ("b" * 16,)
        assert read_hosts(store)[own].written == NOW + passed[0]
    assert look(0, "c") == ("c" * 16,), "a changed choice is written"
    for known in both:
        known.close()
