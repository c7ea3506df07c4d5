"""Test that `verify` reports a partition in two logs: it may be in one only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scarctl.state.layout import Layout
from scarctl.store import Store, Topology, create_topology, open_writer, verify
from scarctl.store.format import record_path
from tests.store.helpers import Data
from tests.support.log_per_shard import store_with_a_log_per_shard


def save(store: Store, layout: Layout, data: Data, logs: dict[int, list[int]]) -> None:
    """Commit these partitions to these logs, as of step 1."""
    for log, ids in logs.items():
        shard_of = np.full(layout.partitions, -1, np.int32)
        shard_of[ids] = log
        with open_writer(store, layout=layout, shard_of=shard_of) as writer:
            writer.commit(log, np.array(ids), data, step=1)


def test_two_logs_with_one_partition(tmp_path: Path, layout: Layout, data: Data) -> None:
    store = store_with_a_log_per_shard(tmp_path / "run", shards=3)
    save(store, layout, data, {0: [0, 1, 2], 1: [3, 4], 2: [1, 2, 5]})
    (problem,) = verify(store, read_data=False).problems
    assert problem.file == str(store.root / record_path(2, store.state(2).seq))
    assert problem.reason == f"log 0 has 2 partitions of log 2, too, such as {layout.name(1)}"


def test_another_log_than_the_one(tmp_path: Path, layout: Layout, data: Data) -> None:
    store = Store.create(tmp_path / "run", shards=3)
    save(store, layout, data, {0: list(range(layout.partitions)), 2: [5]})
    (problem,) = verify(store, read_data=False).problems
    assert problem.file == str(store.root / record_path(2, store.state(2).seq))
    assert problem.reason == "it has 1 partition in log 2, but this store has one log, number 0"


@pytest.mark.parametrize("one_log", [False, True])
def test_shards_of_ranks_may(tmp_path: Path, layout: Layout, data: Data, one_log: bool) -> None:
    """A process alone has saved the state, and then two ranks, each of them all of it: `prune` retires the first."""
    create = Store.create if one_log else store_with_a_log_per_shard
    store = create(tmp_path / "run", shards=2)
    with open_writer(store, layout=layout) as writer:
        for log, ids in writer.members.items():
            writer.commit(log, ids, data, step=1)
    create_topology(store, Topology(2, (2, 3), "0" * 64))
    for shard in (2, 3):
        view = store.of_shard(shard, 2)
        with open_writer(view, layout=layout) as writer:
            writer.commit(shard, np.arange(layout.partitions), data, step=2)
    assert verify(store, read_data=True).problems == []
