"""Test to which whole state a lane's copies belong: in its log, after compaction and a roll-back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scarctl.errors import UsageError
from scarctl.state.layout import Layout
from scarctl.store import (
    Collector,
    Store,
    StoreWriter,
    Topology,
    complete_sets,
    create_topology,
    open_writer,
    sealed_sets,
)
from tests.store.helpers import Data

A, B = "ab" * 16, "cd" * 16


def test_a_commit_of_a_part_ends_it_and_a_seal_begins_it(
    store: Store, writer: StoreWriter, data: Data
) -> None:
    ids, found = np.arange(data.layout.partitions), list[tuple[str, str]]()

    def note() -> None:
        for state in (writer.state, store.state(0)):
            found.append((state.whole, state.extras_whole))
        assert found[-1] == found[-2]

    writer.commit(ids, data, step=5, sealed=True, whole=A, extras={})
    note()
    writer.commit(ids[:0], data, step=5, extras={})
    note()
    writer.commit(ids[:3], data, step=5)
    note()
    writer.commit(ids[:1], data, step=5, sealed=True, whole=B, extras={})
    note()
    sealed = writer.commit(ids[:0], data, step=5, sealed=True)
    note()
    own = sealed.place.identity
    assert found[::2] == [(A, A), (A, ""), ("", ""), (B, B), (own, B)]
    assert [seal.whole for seal in store.state(0).sealed] == [A, B, own]


def test_it_outlives_compaction_and_roll_back(tmp_path: Path, layout: Layout, data: Data) -> None:
    store = Store.create(tmp_path / "s")
    ids = np.arange(layout.partitions)
    with open_writer(store, layout=layout) as writer:
        first = writer.commit(ids, data, step=5, sealed=True, whole=A, extras={})
        for step in range(6, 12):
            writer.commit(ids[:: step % 3 + 1], data, step=step)
        writer.commit(ids[::2], data, step=20, sealed=True, whole=B, extras={})
        Collector(writer, floor=0).collect()
    state = Store.open(store.root).state(0)
    assert (state.whole, state.extras_whole) == (B, B)
    assert [seal.whole for seal in state.sealed] == [B]
    with open_writer(store, layout=layout) as writer:
        assert (writer.state.whole, writer.state.extras_whole) == (B, B)
        seal = writer.state.sealed[-1]
        writer.commit(ids[:2], data, step=21)
        assert writer.state.whole == ""
        writer.roll_back(seal.seq)
        assert writer.state.whole == B
    assert Store.open(store.root).state(0).whole == B
    assert first.whole == A


def test_of_two_commits_of_one_version_only_the_one_that_all_have_is_a_set(
    tmp_path: Path, layout: Layout
) -> None:
    store, data, ids = Store.create(tmp_path / "s"), Data(layout), np.arange(layout.partitions)
    create_topology(store, Topology(1, (0, 1), "0" * 64))
    with (
        open_writer(store.of_shard(0), layout=layout) as first,
        open_writer(store.of_shard(1), layout=layout) as second,
    ):
        for writer in (first, second):
            writer.commit(ids, data, step=5, sealed=True, whole=A)
        data.change(range(layout.partitions), 1)
        first.commit(ids, data, step=5, sealed=True, whole=B)
        (only,) = sealed_sets([first.state, second.state])
    assert only == complete_sets(Store.open(store.root))[0]
    assert (only.whole, {shard: place.k for shard, place in only.places.items()}) == (A, {0: 2, 1: 2})


def test_a_name_that_cannot_be_is_refused(writer: StoreWriter, data: Data) -> None:
    ids = np.arange(data.layout.partitions)
    for call in ({"whole": A}, {"whole": "x", "sealed": True}):
        with pytest.raises(UsageError):
            writer.commit(ids, data, step=1, **call)  # type: ignore[arg-type]
