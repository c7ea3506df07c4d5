"""Test writers that were stopped for long: records that a newer writer has collected must not let them commit again."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scarctl.errors import Fenced, Unavailable, UsageError
from scarctl.state.layout import Layout
from scarctl.store import (
    Collector,
    InDoubt,
    Store,
    StoreWriter,
    create_snapshot,
    open_writer,
    sealed_sets,
    snapshots,
    verify,
)
from scarctl.store.backends.base import Buffer
from scarctl.store.format import record_path
from scarctl.store.lock import NoLock
from tests.store.helpers import Data, read_all

NEW = 7
"""Number of commits of a shard."""


@pytest.fixture(params=["local, its lock lost", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(Store, "take_lock", lambda store: NoLock())
    where = str(tmp_path / "run") if request.param != "memory" else f"memory:///{uuid.uuid4().hex}/run"
    Store.create(where, shards=1)
    return where


def open_at(url: str, layout: Layout) -> StoreWriter:
    return open_writer(Store.open(url), layout=layout, shard_of=layout.shards(1, 0))


def go_on(writer: StoreWriter, data: Data, steps: int = NEW) -> None:
    """Commit a few partitions several times, then collect as much as possible."""
    first = writer.states[0].step + 1
    for step in range(first, first + steps):
        data.change(range(5), step)
        writer.commit(0, np.arange(5), data, step=step)
    Collector(writer, floor=0).collect()


def check(url: str, expected: dict[int, bytes]) -> None:
    store = Store.open(url)
    assert read_all(store, store.state(0)) == (expected, {})
    assert verify(store, read_data=True).problems == []


class Hooked:
    """Blobs that do something before, or in place of, creating one file."""

    def __init__(self, inner: Any, name: str, action: Any, *, after: bool = False) -> None:
        self.inner, self.name, self.action, self.after = inner, name, action, after

    def create_exclusive(self, name: str, parts: Sequence[Buffer]) -> None:
        action, self.action = (self.action, None) if name == self.name else (None, self.action)
        if action is not None and not self.after:
            action()
        self.inner.create_exclusive(name, parts)
        if action is not None and self.after:
            action()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_a_zombie_finds_its_next_number_free(url: str, layout: Layout) -> None:
    data, ids = Data(layout), np.arange(layout.partitions)
    zombie = open_at(url, layout)
    zombie.commit(0, ids, data, step=1)
    newer = open_at(url, layout)
    go_on(newer, data)
    expected = data.all(ids.tolist())
    assert zombie.states[0].seq + 1 not in newer.store.log(0).numbers()
    # Its own copies are garbage to it, and the newer writer continues from some of them.
    with pytest.raises(Fenced, match="a newer writer has taken over"):
        zombie.commit(0, ids[5:], Data(layout, 1), step=50)
    for attempt in (lambda: Collector(zombie, floor=0).collect(), lambda: zombie.roll_back({0: 1})):
        with pytest.raises(Fenced):
            attempt()
    check(url, expected)
    go_on(newer, data)
    check(url, data.all(ids.tolist()))
    assert verify(newer.store, read_data=True).orphans == []  # the stopped writer's files are gone too


@pytest.mark.parametrize("old", [0, 1])
def test_an_opening_that_is_stopped_before_its_first_record(url: str, layout: Layout, old: int) -> None:
    """It read a log that has been collected since, so it starts over. `old`: 0 for a log that was empty."""
    data, ids = Data(layout), np.arange(layout.partitions)
    if old:
        open_at(url, layout).commit(0, ids, data, step=0)
    store = Store.open(url)
    seq = store.state(0).seq + 1

    def overtake() -> None:
        with open_at(url, layout) as newer:
            newer.commit(0, ids, data, step=1)
            go_on(newer, data)

    store.blobs = Hooked(store.blobs, record_path(0, seq), overtake)
    with open_writer(store, layout=layout, shard_of=layout.shards(1, 0)) as writer:
        assert writer.states[0].seq > seq + NEW
        assert read_all(store, writer.states[0]) == (data.all(ids.tolist()), {})
        data.change(ids.tolist(), 99)
        writer.commit(0, ids, data, step=100)
    check(url, data.all(ids.tolist()))


def test_another_zombie_takes_the_number_of_the_ground(url: str, layout: Layout) -> None:
    """A record with the number of the ground that a stopped writer looks for exists again, but is another record."""
    data, ids = Data(layout), np.arange(layout.partitions)
    zombie = open_at(url, layout)
    zombie.commit(0, ids, data, step=1)
    opening = Store.open(url)
    ground = zombie.states[0].seq + 1

    def overtake() -> None:
        assert zombie.advance_boundary(0, frozenset()) == ground - 1
        go_on(open_at(url, layout), data)

    opening.blobs = Hooked(opening.blobs, record_path(0, ground), overtake)
    newest = open_writer(opening, layout=layout, shard_of=layout.shards(1, 0))
    numbers = opening.log(0).numbers()
    assert ground in numbers
    assert ground + 1 not in numbers
    with pytest.raises(Fenced, match="a newer writer has taken over"):
        zombie.commit(0, ids[5:], Data(layout, 1), step=50)
    check(url, data.all(ids.tolist()))
    go_on(newest, data)
    check(url, data.all(ids.tolist()))


@pytest.mark.parametrize("collects", [False, True])
def test_a_late_request_brings_the_ground_back(url: str, layout: Layout, collects: bool) -> None:
    """`collects`: the ground is the stopped writer's own boundary, otherwise the log's first record."""
    data, ids = Data(layout), np.arange(layout.partitions)
    zombie = open_at(url, layout)
    zombie.commit(0, ids, data, step=1)
    ground = zombie.advance_boundary(0, frozenset()) + 1 if collects else 0
    path = record_path(0, ground)
    late = zombie.store.log(0).record(ground).data
    newer = open_at(url, layout)
    go_on(newer, data)
    newer.store.blobs.create_exclusive(path, [late])
    with pytest.raises(Fenced, match="a newer writer has taken over"):
        zombie.commit(0, ids[5:], Data(layout, 1), step=50)
    check(url, data.all(ids.tolist()))
    go_on(newer, data)
    check(url, data.all(ids.tolist()))


def test_a_writer_that_is_overtaken_but_not_collected_counts(url: str, layout: Layout) -> None:
    """There are indexes above its record, but the log still has it."""
    data, ids = Data(layout), np.arange(layout.partitions)
    writer = open_at(url, layout)
    seq = writer.states[0].seq + 1

    def overtake() -> None:
        with open_at(url, layout) as newer:
            assert newer.states[0].step == 1
        assert writer.store.log(0).indexes()[-1] > seq

    writer.store.blobs = Hooked(writer.store.blobs, record_path(0, seq), overtake, after=True)
    writer.commit(0, ids, data, step=1)
    check(url, data.all(ids.tolist()))
    with pytest.raises(Fenced):
        writer.commit(0, ids, Data(layout, 1), step=2)
    check(url, data.all(ids.tolist()))


def test_a_record_in_doubt_that_was_built_upon_and_collected(url: str, layout: Layout) -> None:
    """Its record is gone because the newer writer has it in an index. Its segment is needed."""
    data, ids = Data(layout), np.arange(layout.partitions)
    zombie = open_at(url, layout)
    seq = zombie.states[0].seq + 1

    def lose() -> None:
        raise InDoubt("the answer is lost")

    zombie.store.blobs = Hooked(zombie.store.blobs, record_path(0, seq), lose, after=True)
    with pytest.raises(InDoubt):
        zombie.commit(0, ids, data, step=1)
    newer = open_at(url, layout)
    assert newer.states[0].step == 1
    go_on(newer, data)
    with pytest.raises(Fenced):
        zombie.commit(0, ids, Data(layout, 1), step=2)
    check(url, data.all(ids.tolist()))


def test_the_other_record_is_collected_before_it_is_read(url: str, layout: Layout) -> None:
    data, ids = Data(layout), np.arange(layout.partitions)
    zombie = open_at(url, layout)
    zombie.commit(0, ids, data, step=1)
    newer = open_at(url, layout)
    seq = zombie.states[0].seq + 1
    there = zombie._publisher.there
    zombie._publisher.there = lambda record: (go_on(newer, data), there(record))[1]  # type: ignore[method-assign]
    with pytest.raises(Fenced):
        zombie.commit(0, ids, Data(layout, 1), step=2)
    assert seq not in newer.store.log(0).numbers()
    check(url, data.all(ids.tolist()))


def test_no_way_back_to_what_was_given_up(url: str, layout: Layout) -> None:
    """Its files may exist for some time: their deleter may be stopped, and continue deleting."""
    data, ids = Data(layout), np.arange(layout.partitions)
    first = open_at(url, layout)
    sealed = [first.commit(0, ids, data, step=step, sealed=True).seq for step in (1, 2)]
    collector = Collector(first, floor=0)
    collector._known(0)
    collector._give_up(0, ())  # and stopped here: nothing is deleted yet
    second = open_at(url, layout)
    assert [seal.seq for seal in second.states[0].sealed] == sealed[1:]
    with pytest.raises(UsageError, match=f"no record {sealed[0]}"):
        second.roll_back({0: sealed[0]})
    while collector._shards[0].garbage:
        collector._delete(0)
    second.roll_back({0: sealed[1]})
    check(url, data.all(ids.tolist()))


class Overtaken:
    """Blobs of a reader next to a writer that continues and collects, after one listing or before one operation."""

    def __init__(self, inner: Any, action: Any, operation: str, name: str) -> None:
        self.inner, self.action, self.operation, self.name = inner, action, operation, name

    def __getattr__(self, operation: str) -> Any:
        def call(name: str, *args: Any) -> Any:
            mine = (operation, name) == (self.operation, self.name)
            action, self.action = (self.action, None) if mine else (None, self.action)
            if action is not None and operation == "read":
                action()
            found = getattr(self.inner, operation)(name, *args)
            if action is not None and operation == "files":
                action()
            return found

        return call if operation in ("files", "read") else getattr(self.inner, operation)


def test_the_newest_record_is_collected_before_it_is_read(url: str, layout: Layout) -> None:
    data = Data(layout)
    newer = open_at(url, layout)
    newer.commit(0, np.arange(layout.partitions), data, step=1)
    store = Store.open(url)
    store.blobs = Overtaken(store.blobs, lambda: go_on(newer, data), "files", "shards/0/log")
    assert store.current_layout() == layout


def test_a_snapshot_of_what_is_collected_already_is_late(url: str, layout: Layout) -> None:
    data, ids = Data(layout), np.arange(layout.partitions)
    newer = open_at(url, layout)
    newer.commit(0, ids, data, step=1, sealed=True)
    store = Store.open(url)
    sealed = sealed_sets([store.state(0)])[0]
    newer.commit(0, ids, data, step=2, sealed=True)
    store.blobs = Overtaken(store.blobs, lambda: go_on(newer, data), "read", record_path(0, sealed.seqs[0]))
    with pytest.raises(Unavailable, match="was collected before it became snapshot 'late'"):
        create_snapshot(store, "late", sealed)
    assert snapshots(store) == []


def test_a_collector_whose_newest_record_is_collected(url: str, layout: Layout) -> None:
    """It finds the index that it was about to write, and not the record."""
    data, ids = Data(layout), np.arange(layout.partitions)
    zombie = open_at(url, layout)
    zombie.commit(0, ids, data, step=1)  # all of the members: there is an index now
    newer = open_at(url, layout)
    path = record_path(0, zombie.states[0].seq)
    zombie.store.blobs = Overtaken(zombie.store.blobs, lambda: go_on(newer, data), "read", path)
    with pytest.raises(Fenced):
        zombie.advance_boundary(0, frozenset())
    check(url, data.all(ids.tolist()))
