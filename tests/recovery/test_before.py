"""Test the plan that takes no copy later than a step, and that its execution keeps to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scarctl.arena.arena import Arena
from scarctl.errors import NoIntactCopy
from scarctl.recovery.before import in_memory_before, plan_before
from scarctl.recovery.execute import execute
from scarctl.recovery.plan import MEMORY, STORE, Plan
from scarctl.state.version import pack, step_of
from scarctl.store.format import segment_path
from tests.recovery.test_plan import Collect, Job, values

IDS = np.array([0, 3, 4])


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Return a job whose memory has step 9 of partitions 0 and 3, and step 2 of all others, as the store has."""
    made = Job(tmp_path)
    made.change(made.all, 2)
    made.save(made.all, 2)
    made.change(IDS[:2], 5)
    made.save(IDS[:2], 5)
    made.saved = [values(made.live, i) for i in IDS.tolist()]  # type: ignore[attr-defined]
    made.change(IDS[:2], 9)
    made.save(IDS[:2], 9)
    made.live.slot.stamp(made.moment, pack(made.writer.epoch, 9), "ab" * 16)
    return made


def planned(job: Job, before: int, ids: np.ndarray = IDS) -> Plan:  # type: ignore[type-arg]
    return plan_before(ids, job.layout, job.shard_of, job.store, job.store.state(0), job.live, before)


def test_memory_is_taken_where_it_is_early_enough_and_the_store_elsewhere(job: Job) -> None:
    assert in_memory_before(job.live, IDS, 8)[0].tolist() == [False, False, True]
    plan = planned(job, 8)
    assert plan.tier.tolist() == [STORE, STORE, MEMORY]
    assert step_of(plan.version).tolist() == [5, 5, 2]
    assert not plan.label.of_one
    sink = Collect(job.layout)
    report = execute(plan, job.store, job.live, sink)
    assert [values(sink.target, i) for i in IDS.tolist()] == job.saved  # type: ignore[attr-defined]
    assert report.tiers == {"memory": 1, "store": 2}


def test_without_such_a_copy_the_partitions_are_named_and_nothing_changes(job: Job) -> None:
    before = [values(job.live, i) for i in job.all.tolist()]
    with pytest.raises(NoIntactCopy, match=r"no copy of step 1 or earlier: emb\.weight"):
        planned(job, 1)
    assert [values(job.live, i) for i in job.all.tolist()] == before


def test_a_damaged_copy_is_not_replaced_by_a_later_one_in_memory(job: Job) -> None:
    plan = planned(job, 8, IDS[:1])
    state = plan.state
    name = state.segments[int(state.segment[state.find(IDS[:1])[0]])].name
    path = Path(job.store.root) / segment_path(0, name)
    content = bytearray(path.read_bytes())
    first = int.from_bytes(content[:8], "little") + 8
    content[first : first + 64] = bytes(byte ^ 255 for byte in content[first : first + 64])
    path.write_bytes(content)
    report = execute(plan, job.store, job.live, Collect(job.layout))
    assert report.degraded
    assert step_of(report.plan.version).tolist() == [2]


def test_the_slot_that_is_not_current_has_an_older_copy(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.change(job.all, 2)
    job.save(job.all, 2)
    arena = job.live = Arena.anonymous(job.layout, slots=2)
    for step, ids in ((4, job.all), (6, IDS[:2])):
        begun = arena.begin_moment()
        assert begun is not None
        slot, moment = begun
        arena.carry(np.setdiff1d(job.all, ids))
        slot.end(ids, pack(job.writer.epoch, step), moment)
        arena.flip(slot, moment, pack(job.writer.epoch, step), "ab" * 16)
    near, older = in_memory_before(arena, IDS, 5)
    assert (near.tolist(), older.tolist()) == ([True] * 3, [True, True, False])
    plan = planned(job, 5)
    assert plan.spare.tolist() == IDS[:2].tolist()
    assert step_of(plan.version).tolist() == [4, 4, 4]
    near, older = in_memory_before(arena, IDS, 3)
    assert not near.any()
