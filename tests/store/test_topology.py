"""Test topologies: files, which shards make a state, what one process may not do, and retiring old shards."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from scarctl.errors import Contention, Corruption, UsageError
from scarctl.recovery.reshard import find_parts, topology_of
from scarctl.store import (
    Collector,
    Store,
    Topology,
    complete_sets,
    create_snapshot,
    create_topology,
    newest_topology,
    open_writer,
    read_snapshot,
    topology_epochs,
    verify,
)
from scarctl.store.format import FORMAT
from scarctl.store.prune import Retention, plan_prune, prune
from scarctl.store.topology import read_topology
from tests.support.ranks import RankStore, layout_of


def test_a_topology_is_read_as_it_was_written(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "s")
    assert newest_topology(store) is None
    first, second = Topology(1, (0, 1), "ab" * 32), Topology(7, (5, 2, 3), "cd" * 32)
    create_topology(store, first)
    create_topology(store, second)
    assert newest_topology(store.again()) == second
    assert read_topology(store, 1) == first
    assert (second.world, topology_epochs(store)) == (3, [1, 7])


def test_of_two_jobs_that_begin_at_one_moment_one_fails(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "s")
    create_topology(store, Topology(4, (0,), "ab" * 32))
    with pytest.raises(Contention, match="another job"):
        create_topology(store, Topology(4, (1,), "cd" * 32))


@pytest.mark.parametrize(
    "change",
    [
        {"shards": []},
        {"shards": [0, 0]},
        {"shards": [-1]},
        {"shards": [1_000_000]},
        {"shards": [True]},
        {"shards": "01"},
        {"epoch": 2},
        {"kind": "snapshot"},
        {"division": "xyz"},
        {"format": FORMAT + 1},
        {"division": ""},
        {"independent": "yes"},
        {"independent": 1},
        {"independent": True, "shards": [0, 2]},
        {"independent": True, "shards": [1, 0]},
    ],
)
def test_a_topology_that_lies_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    from scarctl.store.format import canonical, checksum

    store = Store.create(tmp_path / "s")
    create_topology(store, Topology(1, (0, 1), "ab" * 32))
    path = tmp_path / "s/topology/00000001.json"
    obj = {k: v for k, v in json.loads(path.read_bytes()).items() if k != "checksum"} | change
    path.write_bytes(canonical({**obj, "checksum": checksum(obj)}))
    with pytest.raises(Corruption, match=r"topology/00000001\.json"):
        read_topology(store, 1)
    assert [problem.file for problem in verify(store, read_data=False).problems] == [str(path)]


def test_a_damaged_topology_is_found_and_the_error_says_what_next(tmp_path: Path) -> None:
    ranks = RankStore(tmp_path / "s", 2).save(3).close()
    path = tmp_path / "s/topology/00000001.json"
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    with pytest.raises(Corruption) as error:
        find_parts(ranks.store)
    assert "data are not affected" in error.value.hint
    assert [problem.file for problem in verify(ranks.store, read_data=False).problems] == [str(path)]


def test_one_process_may_not_write_to_a_store_of_ranks(tmp_path: Path) -> None:
    RankStore(tmp_path / "s", 4).save(3).close()
    layout = layout_of(0, 4)
    store = Store.open(tmp_path / "s")
    with pytest.raises(UsageError, match="written by 4 ranks") as error:
        open_writer(store, layout=layout)
    assert error.value.kind == "store-of-ranks"
    store.take_lock().release()  # it is not held


def test_a_rank_that_owns_nothing_has_a_log_all_the_same(tmp_path: Path) -> None:
    from scarctl.state.layout import Layout

    ranks = RankStore(tmp_path / "s", 2).save(3).close()
    store = ranks.store
    create_topology(store, Topology(9, (0, 1, 2), "ab" * 32))
    view, empty = store.of_shard(2), Layout([], "Adam")
    with open_writer(view, layout=empty) as writer:
        writer.commit(np.empty(0, np.int64), ranks.source(0, 3), step=3, sealed=True, extras={"step": 3})
    state = store.state(2)
    assert (state.step, len(state.ids), [seal.step for seal in state.sealed]) == (3, 0, [3])
    parts = find_parts(store)
    assert parts is not None
    assert parts.topology is not None
    assert parts.topology.world == 3
    assert verify(store, read_data=True).intact


def test_sealed_by_all_ranks(tmp_path: Path) -> None:
    ranks = RankStore(tmp_path / "s", 4)
    for step, who in ((3, (0, 1, 2, 3)), (5, (0, 1, 2)), (6, (0, 1, 2, 3)), (8, (3,))):
        ranks.save(step, who)
    ranks.close()
    sets = complete_sets(Store.open(tmp_path / "s"))
    assert [one.step for one in sets] == [6, 3]
    assert all(sorted(one.seqs) == [0, 1, 2, 3] for one in sets)


def test_nothing_is_sealed_by_all_while_a_rank_has_no_log(tmp_path: Path) -> None:
    ranks = RankStore(tmp_path / "s", 2).save(3).close()
    create_topology(ranks.store, Topology(9, (0, 5), "ab" * 32))
    assert complete_sets(ranks.store) == []
    assert not plan_prune(ranks.store, Retention()).retire, "shard 1 is still needed"


def test_ranks_that_were_replaced_keep_what_they_have_sealed_together(tmp_path: Path) -> None:
    two = RankStore(tmp_path / "s", 2).save(3)
    RankStore(tmp_path / "s", 3, topology_only=True)
    two.save(5, [0])
    Collector(two.writers[0], floor=0).collect()
    two.close()
    found = find_parts(two.store, sealed=True)
    assert found is not None
    assert (found.topology, found.whole) == (two.topology, two.whole(3))


def test_the_newest_topology_that_is_whole_counts(tmp_path: Path) -> None:
    four = RankStore(tmp_path / "s", 4).save(3).close()
    create_snapshot(four.store, "four", complete_sets(four.store)[0])
    three = RankStore(tmp_path / "s", 3).save(5, [0, 2])
    found = find_parts(four.store)
    assert found is not None
    assert (found.topology, found.passed_over) == (four.topology, (three.topology.epoch,))
    three.save(5, [1]).close()
    found = find_parts(four.store)
    assert found is not None
    assert (found.topology, found.passed_over) == (three.topology, ())
    assert list(found.states) == [4, 5, 6]
    old = find_parts(four.store, snapshot=read_snapshot(four.store, "four"))
    assert old is not None
    assert old.topology == four.topology
    assert topology_of(four.store, [0, 5]) is None


def test_shards_of_earlier_ranks_are_retired(tmp_path: Path) -> None:
    four = RankStore(tmp_path / "s", 4)
    for step in range(3, 7):
        four.save(step)
    four.close()
    create_snapshot(four.store, "four", complete_sets(four.store)[1])
    three = RankStore(tmp_path / "s", 3)
    # Not before the new ranks have a state that all of them have sealed.
    three.save(8, [0, 1])
    assert plan_prune(four.store, Retention()).retire == ()
    three.save(8, [2]).close()
    # Nor while a snapshot needs them.
    assert plan_prune(four.store, Retention()).retire == ()
    plan = plan_prune(four.store, Retention(delete=("four",)))
    assert plan.retire == (0, 1, 2, 3)
    done = prune(four.store, plan)
    assert done.bytes > 0
    for shard in plan.retire:
        files = [path for path in (tmp_path / f"s/lanes/{shard}").rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in files) < 8000
        assert len(four.store.state(shard).ids) == 0
    assert verify(Store.open(tmp_path / "s"), read_data=True).intact
    found = find_parts(Store.open(tmp_path / "s"))
    assert found is not None
    assert found.topology == three.topology
    assert plan_prune(four.store, Retention()).empty


def test_a_retirement_that_was_killed_goes_on(tmp_path: Path) -> None:
    four = RankStore(tmp_path / "s", 4).save(3).close()
    three = RankStore(tmp_path / "s", 3).save(5).close()
    # One of them has lost its members: the old state is no longer whole, and no reader takes it for one.
    view, layout = four.view(1), four.layouts[1]
    open_writer(view, layout=layout, empty=True).close()
    assert find_parts(four.store, but=three.topology.shards) is None
    plan = plan_prune(four.store, Retention())
    assert plan.retire == (0, 1, 2, 3)
    prune(four.store, plan)
    assert plan_prune(four.store, Retention()).retire == ()
    assert verify(Store.open(tmp_path / "s"), read_data=True).intact


def test_beside_a_live_job_shards_of_earlier_ranks_are_retired_too(tmp_path: Path) -> None:
    four = RankStore(tmp_path / "s", 4).save(3)
    three = RankStore(tmp_path / "s", 3).save(5)
    four.writers.pop().close()
    plan = plan_prune(four.store, Retention())
    assert plan.writer is not None
    prune(four.store, plan)
    # A shard whose lock is held stays unchanged.
    assert [len(four.store.state(shard).ids) > 0 for shard in range(4)] == [True, True, True, False]
    three.save(6).close()
    four.close()
    assert complete_sets(four.store)[0].step == 6


def test_pruning_keeps_what_all_ranks_have_sealed(tmp_path: Path) -> None:
    ranks = RankStore(tmp_path / "s", 3)
    for step in range(3, 9):
        ranks.save(step)
    for step in range(9, 12):
        ranks.save(step, [0, 1])  # the third one has fallen behind
    ranks.close()
    store = ranks.store
    prune(store, plan_prune(store, Retention()))
    sets = complete_sets(Store.open(tmp_path / "s"))
    assert [one.step for one in sets] == [8]
    found = find_parts(Store.open(tmp_path / "s"), sealed=True)
    assert found is not None
    assert found.whole == ranks.whole(8)
    assert verify(Store.open(tmp_path / "s"), read_data=True).intact
