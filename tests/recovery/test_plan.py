"""Test the planner and the executor on real stores and arenas, against the copies that were really saved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.errors import NoIntactCopy
from scarctl.recovery.execute import SlotSink, execute
from scarctl.recovery.plan import MEMORY, STORE, Plan, estimate, plan_partial, plan_rollback
from scarctl.recovery.report import Report
from scarctl.state.layout import Layout, TensorSpec, build_layout, rows_of
from scarctl.state.version import pack
from scarctl.store import Store, StoreWriter, open_writer
from scarctl.store.format import segment_path
from scarctl.util.arrays import Ids

SHARDS = 3


def layout() -> Layout:
    return build_layout(
        [
            (
                "emb.weight",
                "parameter",
                (TensorSpec("", "F32", (21, 4)), TensorSpec("exp_avg", "F32", (21, 4))),
            ),
            ("layers.0.w", "parameter", (TensorSpec("", "BF16", (6, 2)),)),
            ("layers.1.w", "parameter", (TensorSpec("", "F32", (6, 2)),)),
            ("step", "buffer", (TensorSpec("", "I64", ()),)),
        ],
        partition_bytes=64,
    )


class Job:
    """A store with a writer, and an arena that stands in for the live state."""

    def __init__(self, folder: Path) -> None:
        self.layout = layout()
        self.store = Store.create(folder / "store", shards=SHARDS)
        self.shard_of = self.layout.shards(SHARDS, 0)
        self.live = Arena.anonymous(self.layout)
        self.all = np.arange(self.layout.partitions)
        self.random = np.random.default_rng(5)
        self.writer: StoreWriter = open_writer(self.store, layout=self.layout)
        self.history: list[dict[int, bytes]] = []
        self.moment = 0

    def change(self, ids: Ids, step: int) -> None:
        """Give partitions new values, as of `step`."""
        version = pack(self.writer.epoch, step)
        starts, stops = self.layout.row_ranges(ids)
        for i, start, stop in zip(ids.tolist(), starts.tolist(), stops.tolist(), strict=True):
            g = int(self.layout.group_of([i])[0])
            for t in range(len(self.layout.groups[g].tensors)):
                rows = self.live.rows(g, t)[start:stop]
                rows[:] = self.random.integers(0, 60, rows.shape, dtype=np.uint8)
        self.moment += 1
        self.live.slot.end(ids, version, self.moment)

    def save(self, ids: Ids, step: int, *, sealed: bool = False) -> None:
        whole = name_of(step) if sealed else ""
        self.writer.commit(ids, self.live.slot.source, step=step, sealed=sealed, whole=whole)

    def segments(self) -> list[Path]:
        """Return the segments with data, oldest first."""
        found = [record.segment for record in self.store.log(0).records() if record.partitions]
        return [self.store.root / segment_path(0, segment.name) for segment in found if segment]

    def plan(self, ids: Ids, arena: Arena | None = None, **options: str) -> Plan:
        return plan_partial(ids, self.layout, self.shard_of, self.store.state(0), arena, **options)


def name_of(step: int) -> str:
    """Return the name of the whole state of a step."""
    return f"{step + 1:032x}"


def values(arena: Arena, i: int) -> bytes:
    """Return all bytes of one partition."""
    g = int(arena.layout.group_of([i])[0])
    (start,), (stop,) = arena.layout.row_ranges([i])
    return b"".join(
        arena.rows(g, t)[start:stop].tobytes() for t in range(len(arena.layout.groups[g].tensors))
    )


class Collect:
    """A sink that keeps its input."""

    arena = None

    def __init__(self, of: Layout) -> None:
        self.layout = of
        self.target = Arena.anonymous(of)
        self.seen: list[int] = []

    def room(self, group: int, ids: Ids) -> None: ...

    def put(self, group: int, ids: Ids, versions: Ids, tensors: Sequence[NDArray[np.uint8]]) -> None:
        rows = rows_of(self.layout, group, ids)
        for t, data in enumerate(tensors):
            self.target.rows(group, t)[rows] = data
        self.seen += ids.tolist()


def run(job: Job, plan: Plan, arena: Arena | None = None) -> tuple[Report, Collect]:
    sink = Collect(job.layout)
    report = execute(plan, job.store, arena, sink)
    assert sorted(set(sink.seen)) == plan.ids.tolist()
    return report, sink


def flip(path: Path) -> None:
    """Damage only the data of a segment."""
    data = bytearray(path.read_bytes())
    at = 8 + int.from_bytes(data[:8], "little")
    data[at] ^= 1
    path.write_bytes(data)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job(tmp_path)
    job.change(job.all, 0)
    job.save(job.all, 0, sealed=True)
    return job


class TestPartial:
    def test_the_newest_saved_values_come_back(self, job: Job) -> None:
        saved = {i: values(job.live, i) for i in job.all.tolist()}
        ids = np.array([0, 2, 5, 11])
        job.change(ids, 4)
        job.save(ids, 4)
        saved |= {i: values(job.live, i) for i in ids.tolist()}
        job.change(job.all, 6)  # never saved
        report, sink = run(job, job.plan(job.all))
        assert {i: values(sink.target, i) for i in job.all.tolist()} == saved
        assert report.tiers == {"store": len(job.all)}
        assert not report.consistent
        assert not report.degraded
        assert report.step is None
        assert report.bytes == job.layout.nbytes
        assert [line["shard"] for line in report.to_json()["shards"]] == [0, 1, 2]

    def test_memory_goes_before_the_store_when_it_is_as_new(self, job: Job) -> None:
        memory = Arena.anonymous(job.layout)
        memory.slot.end(np.array([0]), pack(job.writer.epoch, 0), 1)  # equal
        memory.slot.end(np.array([1]), pack(job.writer.epoch, 9), 2)  # newer
        memory.slot.end(np.array([2]), pack(job.writer.epoch, 9), 0)  # torn
        plan = job.plan(np.arange(4), memory)
        assert plan.tier.tolist() == [MEMORY, MEMORY, STORE, STORE]
        report, sink = run(job, plan, memory)
        assert report.tiers == {"memory": 2, "store": 2}
        assert values(sink.target, 1) == bytes(len(values(sink.target, 1)))
        assert values(sink.target, 2) == values(job.live, 2)

    def test_exact_means_one_step_everywhere(self, job: Job) -> None:
        some = np.array([1, 2])
        assert job.plan(job.all).consistent
        assert not job.plan(some).consistent
        assert job.plan(some, survivors=name_of(0)).consistent
        assert not job.plan(some, survivors=name_of(1)).consistent

    def test_what_was_never_saved_stops_it_before_anything_is_read(self, tmp_path: Path) -> None:
        job = Job(tmp_path)
        job.change(job.all, 0)
        job.save(np.array([0, 1]), 0)
        assert job.plan(np.array([0, 1])).ids.tolist() == [0, 1]
        with pytest.raises(
            NoIntactCopy, match=r"never saved: emb\.weight\[4:6\].* and 7 more \(nothing was changed"
        ):
            job.plan(job.all)

    def test_a_damaged_copy_falls_back_to_the_next_older_one(self, job: Job) -> None:
        i = int(np.flatnonzero(job.shard_of == 1)[0])
        ids = np.array([i])
        old = values(job.live, i)
        for step in (3, 5):
            job.change(ids, step)
            job.save(ids, step)
        flip(job.segments()[-1])
        flip(job.segments()[-2])
        report, sink = run(job, job.plan(ids))
        assert report.degraded
        assert not report.consistent
        assert report.step == 0
        assert values(sink.target, i) == old
        assert any("checksum" in problem for problem in report.problems)

    def test_a_damaged_copy_falls_back_to_memory_when_that_is_newer_than_the_rest(self, job: Job) -> None:
        i = int(np.flatnonzero(job.shard_of == 1)[0])
        ids = np.array([i])
        memory = Arena.anonymous(job.layout)
        memory.slot.end(ids, pack(job.writer.epoch, 3), 1)
        job.change(ids, 5)
        job.save(ids, 5)
        flip(job.segments()[-1])
        report, _ = run(job, job.plan(ids, memory), memory)
        assert (report.tiers, report.degraded, report.step) == ({"memory": 1}, True, 3)

    @pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
    def test_without_any_intact_copy_nothing_is_changed(self, job: Job, damage: str) -> None:
        plan = job.plan(job.all)
        for path in job.segments():
            if damage == "flip":
                flip(path)
            elif damage == "truncate":
                path.write_bytes(path.read_bytes()[:-9])
            else:
                path.unlink()
        target = Arena.anonymous(job.layout, slots=2)
        target.slot.end(job.all, pack(job.writer.epoch, 7), 1)
        before = [values(target, i) for i in job.all.tolist()]
        sink = SlotSink(target)
        with pytest.raises(
            NoIntactCopy, match=r"no intact copy of \S+\[\d+:\d+\].*: .* restore them alone"
        ) as caught:
            execute(plan, job.store, None, sink)
        assert caught.value.exit_code == 16
        assert [values(target, i) for i in job.all.tolist()] == before
        assert target.intact().all()

    def test_what_is_in_doubt_is_degraded(self, job: Job) -> None:
        ids = np.flatnonzero(job.shard_of == 1)
        job.change(ids, 5)
        job.save(ids, 5)
        job.segments()[-1].unlink()
        report, _ = run(job, job.plan(ids))
        assert report.degraded
        assert report.step == 0


class TestIntoAnArena:
    def test_versions_and_acknowledgements_follow(self, job: Job) -> None:
        target = Arena.anonymous(job.layout, slots=2)
        target.distance[:] = 2.0
        ids = np.array([0, 3, 4, 12])
        job.change(ids[:2], 8)
        job.save(ids[:2], 8)
        sink = SlotSink(target)
        report = execute(job.plan(ids), job.store, target, sink)
        assert not target.intact().any(), "the current slot is as it was"
        sink.settle(report.plan, "")
        assert target.intact()[ids].all()
        assert target.intact().sum() == 4
        assert not target.pending().any()
        assert [values(target, i) for i in ids.tolist()] == [values(job.live, i) for i in ids.tolist()]
        assert (target.distance[ids] == 0).all()
        assert report.perturbation.kind == "estimated"
        assert report.perturbation.value == pytest.approx(4.0)

    def test_its_own_copies_stay_as_they_are(self, job: Job) -> None:
        memory = Arena.anonymous(job.layout, slots=2)
        memory.slot.end(job.all[:2], pack(job.writer.epoch, 5), 1)
        sink = SlotSink(memory)
        report = execute(job.plan(job.all, memory), job.store, memory, sink)
        sink.settle(report.plan, "")
        assert report.tiers == {"memory": 2, "store": len(job.all) - 2}
        assert memory.pending()[:2].all()
        assert (memory.moments[:2] == 1).all()
        assert memory.intact().all()


class TestRollback:
    def rollback(self, job: Job, **options: object) -> Plan:
        return plan_rollback(job.store, job.layout, job.shard_of, **options)  # type: ignore[arg-type]

    def test_the_newest_state_that_all_sealed_comes_back_whole(self, job: Job) -> None:
        job.change(job.all, 3)
        job.save(job.all, 3, sealed=True)
        sealed = [values(job.live, i) for i in job.all.tolist()]
        job.change(job.all, 5)
        job.save(job.all[:6], 5)
        plan = self.rollback(job, lost=2)
        report, sink = run(job, plan)
        assert (report.consistent, report.step, report.lost_partitions) == (True, 3, 2)
        assert report.restored_partitions == job.layout.partitions
        assert [values(sink.target, i) for i in job.all.tolist()] == sealed
        assert plan.seq is not None
        job.writer.roll_back(plan.seq)
        state = job.store.state(0)
        assert state.step == 3

    def test_damage_goes_to_the_next_older_sealed_state(self, job: Job) -> None:
        first = [values(job.live, i) for i in job.all.tolist()]
        job.change(job.all, 3)
        job.save(job.all, 3, sealed=True)
        flip(job.segments()[-1])
        report, sink = run(job, self.rollback(job))
        assert (report.step, report.degraded, report.consistent) == (0, True, True)
        assert [values(sink.target, i) for i in job.all.tolist()] == first
        flip(job.segments()[0])
        with pytest.raises(NoIntactCopy, match="no older state"):
            run(job, self.rollback(job))

    def test_a_damaged_record_of_the_newest_sealed_state_is_told(self, job: Job) -> None:
        for step in (3, 5):
            job.change(job.all, step)
            job.save(job.all, step, sealed=step == 3)
        assert not self.rollback(job).degraded
        path = job.store.root / job.store.state(0).sealed[-1].place.path(0)
        path.write_bytes(path.read_bytes()[:-1])
        plan = self.rollback(job)
        assert (plan.step, plan.degraded, plan.consistent) == (0, True, True)

    def test_memory_is_used_where_it_has_the_sealed_copy(self, job: Job) -> None:
        memory = Arena.anonymous(job.layout)
        memory.slot.end(job.all, pack(job.writer.epoch, 0), 1)
        assert set(self.rollback(job, arena=memory).tier.tolist()) == {
            STORE
        }  # the same version is not sufficient
        memory.slot.name(name_of(0))
        assert set(self.rollback(job, arena=memory).tier.tolist()) == {MEMORY}
        memory.slot.begin(job.all[3:4])
        assert set(self.rollback(job, arena=memory).tier.tolist()) == {MEMORY, STORE}

    def test_without_a_sealed_state_it_says_so(self, tmp_path: Path) -> None:
        job = Job(tmp_path)
        job.change(job.all, 0)
        job.save(job.all, 0)
        with pytest.raises(NoIntactCopy) as caught:
            self.rollback(job)
        assert caught.value.kind == "no-sealed-state"


def test_an_estimate_needs_every_distance() -> None:
    assert estimate(np.array([3.0, 4.0])).to_json() == {"value": 5.0, "kind": "estimated"}
    assert estimate(np.array([3.0, np.nan])).to_json() == {"value": None, "kind": "unknown"}
    assert estimate(np.empty(0)).value == 0.0
    assert estimate(np.array([1e308, 1e308])).to_json() == {"value": None, "kind": "unknown"}


@pytest.mark.slow
@hypothesis_settings(max_examples=8)
@given(data=st.data())
def test_whatever_was_saved_last_is_what_comes_back(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    job = Job(tmp_path_factory.mktemp("job"))
    job.change(job.all, 0)
    job.save(job.all, 0, sealed=True)
    model = {i: values(job.live, i) for i in job.all.tolist()}
    some = st.lists(st.sampled_from(job.all.tolist()), unique=True, min_size=1)
    for step in range(1, data.draw(st.integers(1, 5), "commits") + 1):
        ids = np.array(sorted(data.draw(some, "saved")))
        job.change(job.all, step)
        job.save(ids, step)
        model |= {i: values(job.live, i) for i in ids.tolist()}
        if data.draw(st.booleans(), "reopen"):
            job.writer.close()
            job.writer = open_writer(job.store, layout=job.layout)
    lost = np.array(sorted(data.draw(some, "lost")))
    _, sink = run(job, job.plan(lost))
    assert {i: values(sink.target, i) for i in lost.tolist()} == {i: model[i] for i in lost.tolist()}
    job.writer.close()
