"""Test to which whole state a shard's copies belong: in its log, in its index, after compaction and a roll-back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scarctl.errors import Corruption, UsageError
from scarctl.state.layout import Layout
from scarctl.store import Collector, Store, StoreWriter, complete_sets, open_writer, sealed_sets
from scarctl.store.format import canonical, checksum, index_path
from scarctl.store.record import Record, alone
from tests.store.helpers import Data
from tests.support.log_per_shard import store_with_a_log_per_shard

A, B = "ab" * 16, "cd" * 16


def test_a_commit_of_a_part_ends_it_and_a_seal_begins_it(
    store: Store, writer: StoreWriter, data: Data
) -> None:
    ids, found = np.arange(data.layout.partitions), list[tuple[str, str]]()

    def note() -> None:
        for state in (writer.states[0], store.state(0)):
            found.append((state.whole, state.extras_whole))
        assert found[-1] == found[-2]

    writer.commit(0, ids, data, step=5, sealed=True, whole=A, extras={})
    note()
    writer.commit(0, ids[:0], data, step=5, extras={})
    note()
    writer.commit(0, ids[:3], data, step=5)
    note()
    writer.commit(0, ids[:1], data, step=5, sealed=True, whole=B, extras={})
    note()
    sealed = writer.commit(0, ids[:0], data, step=5, sealed=True)
    note()
    own = alone(0, sealed.seq)
    assert found[::2] == [(A, A), (A, ""), ("", ""), (B, B), (own, B)]
    assert [seal.whole for seal in store.state(0).sealed] == [A, B, ""]


def test_it_outlives_index_compaction_and_roll_back(tmp_path: Path, layout: Layout, data: Data) -> None:
    store, shard_of = Store.create(tmp_path / "s"), layout.shards(1, 0)
    ids = np.arange(layout.partitions)
    with open_writer(store, layout=layout, shard_of=shard_of) as writer:
        first = writer.commit(0, ids, data, step=5, sealed=True, whole=A, extras={})
        for step in range(6, 12):
            writer.commit(0, ids[:: step % 3 + 1], data, step=step)
        writer.commit(0, ids[::2], data, step=20, sealed=True, whole=B, extras={})
        Collector(writer, floor=0).collect()
        assert store.root.joinpath(index_path(0, writer.states[0].boundary)).exists()
    state = Store.open(store.root).state(0)
    assert (state.whole, state.extras_whole) == (B, B)
    assert [seal.whole for seal in state.sealed] == [B]
    with open_writer(store, layout=layout, shard_of=shard_of) as writer:
        assert (writer.states[0].whole, writer.states[0].extras_whole) == (B, B)
        seal = writer.states[0].sealed[-1]
        writer.commit(0, ids[:2], data, step=21)
        assert writer.states[0].whole == ""
        writer.roll_back({0: seal.seq})
        assert writer.states[0].whole == B
    assert Store.open(store.root).state(0).whole == B
    assert first.whole == A


def test_of_two_commits_of_one_version_only_the_one_that_all_have_is_a_set(
    tmp_path: Path, layout: Layout
) -> None:
    store, shard_of, data = (
        store_with_a_log_per_shard(tmp_path / "s", shards=2),
        layout.shards(2, 0),
        Data(layout),
    )
    with open_writer(store, layout=layout, shard_of=shard_of) as writer:
        for shard in (0, 1):
            writer.commit(shard, np.flatnonzero(shard_of == shard), data, step=5, sealed=True, whole=A)
        data.change(range(layout.partitions), 1)
        writer.commit(0, np.flatnonzero(shard_of == 0), data, step=5, sealed=True, whole=B)
        (only,) = sealed_sets(writer.states.values())
    assert only == complete_sets(Store.open(store.root))[0]
    assert (only.whole, only.seqs) == (A, {0: 1, 1: 1})


def test_a_record_that_names_what_it_cannot_is_refused() -> None:
    with pytest.raises(UsageError):
        Record(0, 0, "commit", 1, 1, "", "0" * 64, whole=A)
    obj = Record(0, 0, "commit", 1, 1, "", "0" * 64, sealed=True, whole=A).to_json()
    for change in ({"sealed": False}, {"whole": "x"}, {"whole": 3}):
        lies = obj | change
        lies = canonical({**lies, "checksum": checksum(lies)})  # type: ignore[assignment]
        with pytest.raises(Corruption):
            Record.parse(lies, "a record", shard=0, seq=0)  # type: ignore[arg-type]
