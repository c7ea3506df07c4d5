"""Test stores that members share: the first member makes the topology once, and no other process may write."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scarctl.errors import Contention, Corruption, ScarError, SettingsConflict, UsageError
from scarctl.state.group import TensorSpec
from scarctl.state.layout import Layout, build_layout
from scarctl.store import (
    Store,
    Topology,
    create_topology,
    newest_topology,
    open_writer,
    topology_epochs,
    verify,
)
from scarctl.store.format import MAX_SHARD, topology_path
from scarctl.store.lock import StoreLock
from scarctl.store.members import MAX_MEMBERS, join_members, topology_of_members
from tests.support.ranks import RankStore


def layout() -> Layout:
    return build_layout([("w", "parameter", (TensorSpec("", "F32", (8, 4)),))], rows={"w": 2})


def test_the_first_one_makes_the_topology_and_later_ones_compare_theirs(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "s")
    join_members(store, 3)
    made = newest_topology(store)
    assert made is not None
    assert (made.epoch, made.shards, made.independent, made.noun) == (1, (0, 1, 2), True, "member")
    join_members(store.again(), 3)
    assert newest_topology(store.again()) == made
    with pytest.raises(SettingsConflict, match="has 3 members, not 4") as caught:
        join_members(store, 4)
    assert caught.value.kind == "other-members"
    assert topology_epochs(store) == [1]
    join_members(Store.create(tmp_path / "many"), MAX_MEMBERS)


def test_many_first_ones_at_one_moment(tmp_path: Path) -> None:
    for attempt in range(15):
        url = str(tmp_path / f"s{attempt}")
        barrier, found = threading.Barrier(8), list[tuple[int, str]]()

        def join(number: int, url: str = url, barrier: Any = barrier, found: Any = found) -> None:
            count = 8 if number % 4 else 5
            barrier.wait()
            try:
                store = Store.create(url)
                join_members(store, count)
                found.append((count, ""))
            except ScarError as error:
                found.append((count, error.kind))

        threads = [threading.Thread(target=join, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        there = newest_topology(Store.open(url))
        assert there is not None
        assert sorted(found) == sorted(
            (count, "" if count == there.world else "other-members") for count in (8, 8, 8, 8, 8, 8, 5, 5)
        )


def test_another_one_begins_to_save_while_this_one_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It creates the topology and its log just before this one lists the logs."""
    store = Store.create(tmp_path / "s")

    def lock(path: Path, *, shared: bool) -> StoreLock:
        monkeypatch.setattr("scarctl.store.members.StoreLock", StoreLock)
        other = store.again()
        join_members(other, 3)
        open_writer(other.of_shard(1), layout=layout()).close()
        return StoreLock(path, shared=shared)

    monkeypatch.setattr("scarctl.store.members.StoreLock", lock)
    join_members(store, 3)
    assert store.shards() == [1]


def test_a_store_of_one_process_is_not_taken(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "s")
    writer = open_writer(store, layout=layout())
    with writer, pytest.raises(Contention):
        join_members(store.again(), 2)
    with pytest.raises(UsageError, match="one process") as caught:
        join_members(store.again(), 2)
    assert caught.value.kind == "store-of-one-process"
    assert newest_topology(store) is None


def test_one_process_that_is_about_to_begin_keeps_members_out(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "s")
    lock = StoreLock(tmp_path / "s" / "lock")
    with pytest.raises(Contention):
        join_members(store, 2)
    lock.release()
    assert newest_topology(store) is None
    join_members(store, 2)
    with pytest.raises(UsageError, match="written by 2 members") as caught:
        open_writer(store, layout=layout())
    assert caught.value.kind == "store-of-members"


def test_a_store_of_ranks_is_not_taken(tmp_path: Path) -> None:
    ranks = RankStore(tmp_path / "s", 2).close()
    with pytest.raises(UsageError, match="2 ranks, not by members") as caught:
        join_members(ranks.store, 2)
    assert caught.value.kind == "store-of-ranks"
    assert topology_epochs(ranks.store) == [1]


def test_writers_of_members_keep_their_own_epochs(tmp_path: Path) -> None:
    store, state = Store.create(tmp_path / "s"), layout()
    join_members(store, 3)

    def begin(number: int) -> int:
        view = store.of_shard(number)
        with open_writer(view, layout=state) as writer:
            ids = np.arange(state.partitions)
            writer.commit(ids, lambda *_: memoryview(bytes(128)), step=1, sealed=True)
            return writer.epoch

    assert [begin(0), begin(1), begin(1), begin(2), begin(1), begin(0)] == [1, 1, 2, 1, 3, 2]
    assert verify(store, read_data=True).problems == []


def test_a_flipped_bit_in_the_topology_stops_everything_and_the_file_can_be_made_again(
    tmp_path: Path,
) -> None:
    store = Store.create(tmp_path / "s")
    join_members(store, 2)
    path = tmp_path / "s" / topology_path(1)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(Corruption, match="topology") as caught:
        join_members(store, 2)
    assert "the file of another store" in caught.value.hint
    other = Store.create(tmp_path / "other")
    join_members(other, 2)
    path.write_bytes((tmp_path / "other" / topology_path(1)).read_bytes())
    join_members(store, 2)


def test_a_number_that_the_store_had_before_does_not_come_back_by_old_arguments(tmp_path: Path) -> None:
    """A late start of one of the twelve would have fenced the eight that took over from them."""
    store = Store.create(tmp_path / "s")
    join_members(store, 8)
    join_members(store, 12, 8)
    with pytest.raises(SettingsConflict, match="12 members, not 8 since epoch 2; it had 8 before") as caught:
        join_members(store, 8, 12)
    assert "replaces=12, after=2)" in caught.value.hint
    with pytest.raises(SettingsConflict):
        join_members(store, 8, 12, 1)
    assert join_members(store, 8, 12, 2).epoch == 3
    assert join_members(store, 8, 12, 2).epoch == 3, "those that come later"
    for replaces, after in ((8, None), (8, 2), (None, None)):
        with pytest.raises(SettingsConflict, match="it had 12 before"):
            join_members(store, 12, replaces, after)
    assert join_members(store, 12, 8, 3).epoch == 4
    with pytest.raises(SettingsConflict):
        join_members(store, 8, 12, 2)
    with pytest.raises(SettingsConflict):
        join_members(store, 6, 12, 2)
    assert topology_epochs(store) == [1, 2, 3, 4]


def test_members_for_which_no_shard_is_left_are_refused(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "s")
    join_members(store, 2)
    create_topology(store, topology_of_members(3, 2, MAX_SHARD - 5))
    called: list[Topology] = []
    with pytest.raises(UsageError, match="the shards are used up: 3 are left for 4") as caught:
        join_members(store, 4, 3, before=called.append)
    assert "scarctl export" in caught.value.hint
    assert (called, topology_epochs(store)) == ([], [1, 2])
    assert join_members(store, 1, 3).shards == (MAX_SHARD - 2,)
    assert verify(store, read_data=False).problems == []


def test_topologies_of_ranks_are_written_as_before(tmp_path: Path) -> None:
    """This lets older versions read them."""
    assert b"independent" not in Topology(1, (0, 1), "ab" * 32).data
    store = Store.create(tmp_path / "s")
    create_topology(store, topology_of_members(2))
    assert b'"independent":true' in (tmp_path / "s" / topology_path(1)).read_bytes()
