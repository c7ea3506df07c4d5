"""Test writers that were stopped for long: records that a newer writer has collected must not let them commit again."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from scarctl.errors import Fenced, Unavailable, UsageError
from scarctl.state.layout import Layout
from scarctl.store import (
    Collector,
    Store,
    StoreWriter,
    create_snapshot,
    open_writer,
    sealed_sets,
    snapshots,
    verify,
)
from scarctl.store.backends.base import InDoubt
from scarctl.store.format import log_folder
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
    return open_writer(Store.open(url), layout=layout)


def go_on(writer: StoreWriter, data: Data, steps: int = NEW) -> None:
    """Commit a few partitions several times, then collect as much as possible."""
    first = writer.state.step + 1
    for step in range(first, first + steps):
        data.change(range(5), step)
        writer.commit(np.arange(5), data, step=step)
    Collector(writer, floor=0).collect()


def check(url: str, expected: dict[int, bytes]) -> None:
    store = Store.open(url)
    assert read_all(store, store.state(0)) == (expected, {})
    assert verify(store, read_data=True).problems == []


class Hooked:
    """Blobs that do something before, in place of, or after one operation on a record or a folder of records."""

    def __init__(
        self, inner: Any, name: str, action: Any, *, after: bool = False, operation: str = ""
    ) -> None:
        self.inner, self.name, self.action, self.after = inner, name, action, after
        self.operation = operation or "create_exclusive"

    def __getattr__(self, operation: str) -> Any:
        def call(name: str, *args: Any) -> Any:
            mine = "/log" in name and name.endswith(self.name)
            action, self.action = (self.action, None) if mine else (None, self.action)
            if action is not None and not self.after:
                action()
            found = getattr(self.inner, operation)(name, *args)
            if action is not None and self.after:
                action()
            return found

        return call if operation == self.operation else getattr(self.inner, operation)


def test_a_writer_that_was_stopped_for_long(url: str, layout: Layout) -> None:
    """Its log was closed and collected: what has closed it stays, so that none of its numbers is free."""
    data, ids = Data(layout), np.arange(layout.partitions)
    zombie = open_at(url, layout)
    zombie.commit(ids, data, step=1)
    newer = open_at(url, layout)
    go_on(newer, data)
    expected = data.all(ids.tolist())
    assert newer.store.log(0).listed(1, zombie.term.id) == {3}
    with pytest.raises(Fenced, match="a newer writer has taken over"):
        zombie.commit(ids[5:], Data(layout, 1), step=50)
    for attempt in (lambda: Collector(zombie, floor=0).collect(), lambda: zombie.roll_back(1)):
        with pytest.raises(Fenced):
            attempt()
    check(url, expected)
    go_on(newer, data)
    check(url, data.all(ids.tolist()))
    assert verify(newer.store, read_data=True).orphans == []  # the stopped writer's files are gone too


@pytest.mark.parametrize("old", [False, True])
def test_an_opening_that_is_stopped_before_its_first_record(url: str, layout: Layout, old: bool) -> None:
    """Its log is closed by the opening that overtakes it, which goes on and collects."""
    data, ids = Data(layout), np.arange(layout.partitions)
    if old:
        open_at(url, layout).commit(ids, data, step=0)
    store = Store.open(url)

    def overtake() -> None:
        with open_at(url, layout) as newer:
            newer.commit(ids, data, step=1)
            go_on(newer, data)

    store.blobs = Hooked(store.blobs, "1.json", overtake)
    with pytest.raises(Fenced, match="a newer writer has taken over"):
        open_writer(store, layout=layout)
    check(url, data.all(ids.tolist()))


@pytest.mark.parametrize("lost", [False, True])
def test_a_writer_that_is_overtaken_after_its_record_is_fenced(url: str, layout: Layout, lost: bool) -> None:
    """Its record counts, because the opening has found it. It is not acknowledged, because the look comes later."""
    data, ids = Data(layout), np.arange(layout.partitions)
    writer = open_at(url, layout)

    def overtake() -> None:
        with open_at(url, layout) as newer:
            assert newer.state.step == 1
        if lost:
            raise InDoubt("the answer is lost")

    writer.store.blobs = Hooked(writer.store.blobs, "2.json", overtake, after=True)
    with pytest.raises(InDoubt if lost else Fenced):
        writer.commit(ids, data, step=1)
    with pytest.raises(Fenced):
        writer.commit(ids, Data(layout, 1), step=2)
    check(url, data.all(ids.tolist()))


def test_a_record_in_doubt_that_was_built_upon_and_collected(url: str, layout: Layout) -> None:
    """Its record is gone because the newer writer has a full one. Its segment is needed."""
    data, ids = Data(layout), np.arange(layout.partitions)
    zombie = open_at(url, layout)

    def lose() -> None:
        raise InDoubt("the answer is lost")

    zombie.store.blobs = Hooked(zombie.store.blobs, "2.json", lose, after=True)
    with pytest.raises(InDoubt):
        zombie.commit(ids, data, step=1)
    newer = open_at(url, layout)
    assert newer.state.step == 1
    go_on(newer, data)
    with pytest.raises(Fenced):
        zombie.commit(ids, Data(layout, 1), step=2)
    check(url, data.all(ids.tolist()))


def test_a_record_in_doubt_is_put_again_with_the_same_bytes(url: str, layout: Layout) -> None:
    data, ids = Data(layout), np.arange(layout.partitions)
    writer = open_at(url, layout)

    def lose() -> None:
        raise InDoubt("the request is lost")

    writer.store.blobs = Hooked(writer.store.blobs, "2.json", lose)
    with pytest.raises(InDoubt):
        writer.commit(ids, data, step=1)
    assert not writer.is_settled()
    assert Store.open(url).state(0).step == -1
    changed = Data(layout, 1)
    writer.commit(ids[:3], changed, step=2)
    assert [(r.k, r.step) for r in Store.open(url).log(0).records()] == [(1, -1), (2, 1), (3, 2)]
    check(url, data.all(ids.tolist()) | changed.all(range(3)))


def test_a_writer_that_renews_its_term_goes_on_after_a_failure(url: str, layout: Layout) -> None:
    """Its log is closed already, when the first record of the next term fails."""
    data, ids = Data(layout), np.arange(layout.partitions)
    writer = open_at(url, layout)
    writer.commit(ids, data, step=1)
    for fails in (Unavailable("full"), InDoubt("the answer is lost")):

        def fail(fails: Exception = fails) -> None:
            raise fails

        inner = writer.store.blobs
        writer.store.blobs = Hooked(inner, "1.json", fail)
        with pytest.raises(type(fails)):
            writer.renew()
        writer.store.blobs = inner
        data.change(range(3), writer.term.number)
        writer.commit(ids[:3], data, step=writer.state.step + 1)
        assert writer.epoch == 1
        check(url, data.all(ids.tolist()))


def test_a_writer_that_renews_its_term_does_not_take_over_from_a_newer_one(url: str, layout: Layout) -> None:
    data, ids = Data(layout), np.arange(layout.partitions)
    zombie = open_at(url, layout)
    zombie.commit(ids, data, step=1)
    newer = open_at(url, layout)
    for attempt in (zombie.renew, lambda: zombie.roll_back(zombie.state.seq)):
        with pytest.raises(Fenced):
            attempt()
    go_on(newer, data)
    check(url, data.all(ids.tolist()))


def remove(url: str) -> None:
    """Remove a store, as `rm -rf` does."""
    if "://" in url:
        fsspec.filesystem("memory").rm(url.removeprefix("memory://"), recursive=True)
    else:
        shutil.rmtree(url)


@pytest.mark.parametrize("what", ["commit", "seal", "repeat", "renew", "roll back", "collect", "open"])
@pytest.mark.parametrize("new", ["created", "opened", "saved to"])
def test_a_store_that_is_made_again_has_nothing_of_the_writer_of_the_removed_one(
    url: str, layout: Layout, what: str, new: str
) -> None:
    """Its own writer is never told that a newer writer has come."""
    data = Data(layout)
    earlier, old = Store.open(url), open_at(url, layout)
    go_on(old, data)
    removed = old.state.seq
    remove(url)
    Store.create(url, shards=1)
    newer, everything = Data(layout, 100), np.arange(layout.partitions)
    writer = None if new == "created" else open_at(url, layout)
    if writer is not None and new == "saved to":
        writer.commit(everything, newer, step=0)
    acts = {
        "commit": lambda: old.commit(np.arange(3), data, step=100),
        "seal": lambda: old.commit(old.state.ids, data, step=100, sealed=True),
        "repeat": old.repeat,
        "renew": old.renew,
        "roll back": lambda: old.roll_back(removed),
        "collect": lambda: Collector(old, floor=0).collect(),
        "open": lambda: open_writer(earlier, layout=layout),
    }
    before = names(url)
    for _ in range(2):
        with pytest.raises(Fenced, match="another store was made") as info:
            acts[what]()
        assert info.value.kind == "store-replaced"
        assert names(url) == before
    writer = writer or open_at(url, layout)
    writer.commit(everything, newer, step=1)
    writer.renew()
    writer.commit(np.arange(4), newer, step=2)
    check(url, newer.all(everything.tolist()))


def test_a_record_in_doubt_of_a_removed_store_is_given_up_once_another_one_is_in_its_place(
    url: str, layout: Layout
) -> None:
    data, newer = Data(layout), Data(layout, 100)
    old = open_at(url, layout)
    old.commit(old.state.ids, data, step=1)
    old.store.blobs = Hooked(old.store.blobs, "3.json", lambda: remove(url), after=True)
    with pytest.raises(InDoubt, match="the store is missing"):
        old.commit(np.arange(3), data, step=2)
    with pytest.raises(InDoubt, match="the store is missing"):
        old.commit(np.arange(3), data, step=3)
    Store.create(url, shards=1)
    writer = open_at(url, layout)
    before = names(url)
    for _ in range(2):
        with pytest.raises(Fenced, match="another store was made"):
            old.commit(np.arange(3), data, step=3)
    assert names(url) == before
    writer.commit(writer.state.ids, newer, step=1)
    check(url, newer.all(writer.state.ids.tolist()))


def names(url: str) -> set[str]:
    """Return the paths of all files of a store."""
    store = Store.open(url)
    return {
        f"{folder}/{name}"
        for folder in ("lanes/0/terms", "lanes/0/seg")
        for name in store.blobs.names(folder)
    }


def test_no_way_back_to_what_was_given_up(url: str, layout: Layout) -> None:
    """Its files may exist for some time: their deleter may be stopped, and continue deleting."""
    data, ids = Data(layout), np.arange(layout.partitions)
    first = open_at(url, layout)
    sealed = [first.commit(ids, data, step=step, sealed=True).seq for step in (1, 2)]
    collector = Collector(first, floor=0)
    collector._give_up(())  # and stopped here: nothing is deleted yet
    second = open_at(url, layout)
    assert [seal.seq for seal in second.state.sealed] == sealed[1:]
    with pytest.raises(UsageError, match=f"no record {sealed[0]}"):
        second.roll_back(sealed[0])
    while collector._garbage:
        collector._delete()
    second.roll_back(sealed[1])
    check(url, data.all(ids.tolist()))


def test_the_newest_record_is_collected_before_it_is_read(url: str, layout: Layout) -> None:
    data, ids = Data(layout), np.arange(layout.partitions)
    older = open_at(url, layout)
    older.commit(ids, data, step=1)

    def collect() -> None:
        go_on(open_at(url, layout), data)

    for read in (lambda store: store.current_layout() == layout, lambda store: store.state(0).step > 1):
        store = Store.open(url)
        term = max(store.log(0).logs())
        store.blobs = Hooked(store.blobs, log_folder(0, *term), collect, operation="names", after=True)
        assert read(store)


def test_a_snapshot_of_what_is_collected_already_is_late(url: str, layout: Layout) -> None:
    data, ids = Data(layout), np.arange(layout.partitions)
    newer = open_at(url, layout)
    newer.commit(ids, data, step=1, sealed=True)
    store = Store.open(url)
    sealed = sealed_sets([store.state(0)])[0]
    newer.commit(ids, data, step=2, sealed=True)
    path = sealed.places[0].path(0)
    store.blobs = Hooked(store.blobs, path, lambda: go_on(newer, data), operation="read")
    with pytest.raises(Unavailable, match="was collected before it became snapshot 'late'"):
        create_snapshot(store, "late", sealed)
    assert snapshots(store) == []
