"""Test readers, which take no lock: their listings, while a run adds files, must not look like damage."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest

from scarctl.state.layout import Layout
from scarctl.store import (
    Collector,
    Store,
    StoreWriter,
    check,
    create_snapshot,
    delete_snapshot,
    open_writer,
    sealed_sets,
    verify,
)
from scarctl.store.backends.base import BlobReader
from scarctl.store.backends.local import LocalBlobs
from scarctl.store.format import segment_path
from scarctl.store.gc import orphans
from scarctl.store.log import ShardLog
from scarctl.store.prune import Retention, plan_prune, prune
from scarctl.store.shard_state import ShardState
from scarctl.store.term import Place
from tests.store.helpers import Data, read_all

Files = list[tuple[str, int]]


def listing(monkeypatch: pytest.MonkeyPatch, method: str, change: Callable[[list[Any]], list[Any]]) -> None:
    """Change the first listing of records from here on."""
    original, done = getattr(LocalBlobs, method), []

    def listed(blobs: LocalBlobs, of: str) -> list[Any]:
        found = sorted(original(blobs, of))
        if "/log/" not in of or done:
            return found
        done.append(of)
        return change(found)

    monkeypatch.setattr(LocalBlobs, method, listed)


def commit(writer: StoreWriter, data: Data, steps: int) -> None:
    ids = np.arange(data.layout.partitions)
    for _ in range(steps):
        writer.commit(ids, data, step=writer.state.step + 1)


def test_a_listing_that_lacks_a_record_and_has_the_next(
    monkeypatch: pytest.MonkeyPatch, store: Store, writer: StoreWriter, data: Data
) -> None:
    """A directory's entries are not read at one moment: of two new entries the later one may be seen alone."""
    commit(writer, data, 5)

    def lacking(files: list[Any]) -> list[Any]:
        return files[:-2] + files[-1:]

    listing(monkeypatch, "names", lacking)
    assert [record.k for record in store.log(0).records()] == list(range(1, 7))
    listing(monkeypatch, "files", lacking)
    assert verify(store, read_data=True).problems == []


@pytest.mark.parametrize("first", range(2, 12))
def test_what_is_collected_while_all_is_checked(
    monkeypatch: pytest.MonkeyPatch, store: Store, writer: StoreWriter, data: Data, first: int
) -> None:
    """The writer goes on, begins another term, and collects."""
    everything = np.arange(data.layout.partitions)
    writer.commit(everything, data, step=1, sealed=True)
    commit(writer, data, 6)
    collector = Collector(writer, floor=0)
    whole, count = LocalBlobs.files, itertools.count(1)

    def files(blobs: LocalBlobs, folder: str) -> Files:
        found = whole(blobs, folder)
        if next(count) in range(first, first + 3):
            with monkeypatch.context() as undisturbed:
                undisturbed.setattr(LocalBlobs, "files", whole)
                commit(writer, data, 6)
                writer.renew()
                collector.collect()
        return found

    monkeypatch.setattr(LocalBlobs, "files", files)
    assert verify(store, read_data=True).problems == []


def test_pruning_beside_a_writer_spares_what_its_newest_table_names(
    store: Store, layout: Layout, data: Data
) -> None:
    """Copies have newer versions since, but the segments of the term belong to its writer."""
    with open_writer(store, layout=layout) as writer:
        ids = writer.state.ids
        for half in (ids[::2], ids[1::2]):
            writer.commit(half, data, step=1)
        Collector(writer).collect()
    before = read_all(store, store.state(0))[0]
    with open_writer(store, layout=layout) as writer:
        first = writer.state.seq
        data.change(range(layout.partitions), 1)
        commit(writer, data, 2)
        plan = plan_prune(store, Retention())
        assert plan.writer is not None
        prune(store, plan)
        assert verify(store, read_data=True).problems == []
        assert read_all(store, store.state(0, at=first)) == (before, {})


def test_a_reader_that_began_before_a_roll_back(store: Store, writer: StoreWriter, data: Data) -> None:
    """The files that it was about to read are collected: it gets the state after the roll-back."""
    everything = np.arange(data.layout.partitions)
    sealed = writer.commit(everything, data, step=1, sealed=True)
    before = data.all(everything.tolist())
    data.change(everything.tolist(), 1)
    writer.commit(everything, data, step=2)
    state = store.state(0)
    writer.roll_back(sealed.seq)
    Collector(writer, floor=0).collect()
    assert read_all(store, state) == (before, {})
    assert set(state.version.tolist()) == {sealed.version}


@pytest.mark.parametrize("look", [1, 2])
def test_a_snapshot_that_is_deleted_while_its_segment_is_checked(
    monkeypatch: pytest.MonkeyPatch, store: Store, writer: StoreWriter, data: Data, look: int
) -> None:
    """The segment is deleted before its table, or its data are read."""
    ids = np.arange(data.layout.partitions)
    sealed = writer.commit(ids, data, step=1, sealed=True)
    create_snapshot(store, "kept", sealed_sets([writer.state])[0])
    data.change(ids.tolist(), 1)
    writer.commit(ids, data, step=2, sealed=True)
    Collector(writer, floor=0).collect()
    assert sealed.segment is not None
    path = segment_path(0, sealed.segment.name)
    original, opened = LocalBlobs.reader, []

    def reader(blobs: LocalBlobs, of: str) -> AbstractContextManager[BlobReader]:
        if of == path:
            opened.append(of)
            if len(opened) == look:
                delete_snapshot(store, "kept")
                Collector(writer, floor=0).collect()
        return original(blobs, of)

    monkeypatch.setattr(LocalBlobs, "reader", reader)
    assert verify(store, read_data=True).problems == []
    assert not (store.root / path).exists()


def test_a_missing_segment_is_damage_only_if_it_is_needed_in_two_readings(
    monkeypatch: pytest.MonkeyPatch, store: Store, writer: StoreWriter, data: Data
) -> None:
    """Beside a writer the first one may be of an earlier moment."""
    ids = np.arange(data.layout.partitions)
    first = writer.commit(ids, data, step=1, sealed=True)
    assert first.segment is not None
    path = segment_path(0, first.segment.name)
    earlier = [store.log(0).state()]
    original, state, saved = check.open_segment, ShardLog.state, list[int]()

    def opening(blobs: Any, of: str, ref: Any) -> Any:
        if of == path and not saved:
            for step in (2, 3):
                saved.append(step)
                data.change(ids.tolist(), step)
                writer.commit(ids, data, step=step, sealed=True)
                Collector(writer, floor=0).collect()
        return original(blobs, of, ref)

    def reading(log: ShardLog, *arguments: Any, **options: Any) -> ShardState:
        return earlier.pop() if saved and earlier else state(log, *arguments, **options)

    monkeypatch.setattr(check, "open_segment", opening)
    monkeypatch.setattr(ShardLog, "state", reading)
    assert verify(store, read_data=True).problems == []
    assert (saved, earlier, (store.root / path).exists()) == ([2, 3], [], False)


def test_a_kept_state_that_is_collected_while_orphans_are_looked_for(
    monkeypatch: pytest.MonkeyPatch, store: Store, data: Data, layout: Layout
) -> None:
    ids, original = np.arange(data.layout.partitions), ShardLog.state_at
    with open_writer(store, layout=layout) as earlier:
        earlier.commit(ids, data, step=1, sealed=True)
    with open_writer(store, layout=layout) as writer:
        commit(writer, data, 2)
        met = []

        def collects(log: ShardLog, place: Place, **options: Any) -> ShardState:
            if not met:
                met.append(place)
                writer.commit(ids, data, step=writer.state.step + 1, sealed=True)
                Collector(writer).collect()
            return original(log, place, **options)

        with monkeypatch.context() as patch:
            patch.setattr(ShardLog, "state_at", collects)
            assert orphans(Store.open(str(store.root)), 0) == []
        (place,) = met
        assert not store.blobs.has(place.path(0))
        assert verify(store, read_data=True).problems == []
