"""Test the replay of a store's logs: each state equals reading the store; and the steps that deaths have lost."""

from __future__ import annotations

import datetime
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import scarctl
from scarctl.errors import Corruption
from scarctl.ops.falls import with_falls
from scarctl.ops.timeline import timeline
from scarctl.state.journal import Event, Sample
from scarctl.state.version import step_of
from scarctl.store import Collector, Store, open_writer, verify
from tests.store.helpers import Data, small_layout


def trained(folder: Path, *, steps: int, shards: int = 1, seal: bool = True, mode: str = "partial") -> Store:
    """Return a store of a run over a table of which each step changes a few rows."""
    state: dict[str, NDArray[np.float64]] = {"table": np.zeros((64, 8)), "head": np.zeros((4, 8))}
    session = scarctl.attach(
        state,
        store=folder,
        interval=1,
        partitioning=scarctl.Partitioning(rows={"table": 4, "head": 4}, shards=shards),
        settings=scarctl.Settings(daemon=False),
    )
    begun = session.resume(mode).step  # type: ignore[arg-type]
    for step in range(begun, begun + steps):
        state["table"][step % 64] += 1.0
        session.step()
        session.checkpoint(wait=True)
    session.close(seal=seal)
    return Store.open(folder)


@pytest.mark.parametrize("shards", [1, 3])
def test_the_replay_has_what_the_store_had(tmp_path: Path, shards: int) -> None:
    store = trained(tmp_path / "store", steps=12, shards=shards)
    found = timeline(store, store.shards())
    states = [store.state(shard) for shard in store.shards()]
    steps = np.concatenate([step_of(state.version) for state in states])
    last = found.points[-1]
    assert (last.newest, last.median, last.oldest) == (steps.max(), np.median(steps), steps.min())
    assert found.commits == sum(r.commits for shard in store.shards() for r in store.log(shard).records())
    for shard in store.shards():
        for record, _, ids, state in store.log(shard).replay(10_000):
            there = store.state(shard, at=record.seq)
            assert state is not None
            assert np.array_equal(state.version, there.version)
            assert state.whole == there.whole
            if record.commits:
                assert ids is not None
                assert len(ids) == record.partitions


def test_layers_are_shown_by_what_was_saved_of_them(tmp_path: Path) -> None:
    store = trained(tmp_path / "store", steps=12, seal=False)
    found = timeline(store, store.shards())
    assert found.layers == ("head", "table") or found.layers == ("table", "head")
    saved = dict(zip(found.layers, found.saved, strict=True))
    # The first checkpoint saves everything; after it only the table changes.
    assert sum(saved["head"]) == pytest.approx(1.0)
    assert sum(saved["table"]) > 1.0
    assert len(found.spans) == len(saved["head"])


def test_a_start_after_a_kill_is_a_failure_and_one_after_a_close_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    trained(folder, steps=2)
    trained(folder, steps=2, seal=False)
    store = trained(folder, steps=2, seal=False)
    starts = timeline(store, store.shards()).starts
    assert [start.after_failure for start in starts][-2:] == [False, True]
    assert [start.epoch for start in starts] == sorted(start.epoch for start in starts)


def test_a_rollback_takes_the_copies_back(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    trained(folder, steps=4)
    trained(folder, steps=6, seal=False)
    store = trained(folder, steps=1, seal=False, mode="rollback")
    steps = step_of(store.state(0).version)
    last = timeline(store, store.shards()).points[-1]
    assert (last.newest, last.oldest) == (steps.max(), steps.min()) == (5, 4)


def test_a_missing_record_is_named(tmp_path: Path) -> None:
    store = trained(tmp_path / "store", steps=6, seal=False)
    middle = sorted((tmp_path / "store" / "lanes").glob("*/log/*/*"))[-3]
    middle.unlink()
    with pytest.raises(Corruption):
        timeline(store.again(), store.shards())


def test_what_a_writer_has_collected_is_no_damage(tmp_path: Path) -> None:
    """The records of its own term stay, and have no segments."""
    layout = small_layout()
    store, data = Store.create(tmp_path / "store"), Data(layout)
    everything = np.arange(layout.partitions)
    with open_writer(store, layout=layout) as writer:
        writer.commit(everything, data, step=1, sealed=True)
        writer.commit(everything[::2], data, step=2)
        writer.commit(everything, data, step=3, sealed=True)
        Collector(writer).collect()
        writer.commit(everything[:4], data, step=4)
    assert verify(store, read_data=True).intact
    found = timeline(store, store.shards())
    assert [(point.newest, point.oldest) for point in found.points] == [(3, 3), (3, 3), (4, 3)]
    assert [start.step for start in found.starts] == [0]
    assert found.commits == 4
    saved = {name: sum(row) for name, row in zip(found.layers, found.saved, strict=True)}
    assert saved == pytest.approx({"emb": 1 + 4 / 37, "fc.weight": 1, "count": 1, "odd": 1})


def test_an_empty_store_has_no_history(tmp_path: Path) -> None:
    found = timeline(Store.create(tmp_path / "store"), [])
    assert (found.points, found.commits, found.layers) == ((), 0, ())


def sample(seconds: float, head: float) -> Sample:
    return Sample(seconds, head, head - 1, head - 5, 0.5)


def resumed(seconds: float, step: int, reached: object) -> Event:
    at = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).isoformat()
    return Event("resumed", at, step, {"reached": reached})  # type: ignore[dict-item]


def test_the_line_rises_to_the_last_step_and_falls_at_the_death() -> None:
    samples = [sample(100.0, 0), sample(110.0, 100), sample(130.0, 150), sample(140.0, 250)]
    found = with_falls(samples, [resumed(125.0, 100, 130)])
    # 0.1 s per step until the death, and 12 s until the resume.
    assert [(one.seconds, one.head) for one in found] == [
        (100.0, 0),
        (110.0, 100),
        (113.0, 130),
        (113.0, 100),
        (125.0, 100),
        (130.0, 150),
        (140.0, 250),
    ]
    assert [one.durable for one in found[2:5]] == [95, 95, 95]


def test_two_deaths_have_the_pace_of_their_own_runs() -> None:
    samples = [sample(100.0, 0), sample(110.0, 100), sample(130.0, 110), sample(150.0, 120)]
    events = [resumed(125.0, 100, 130), resumed(200.0, 120, 125)]
    heads = [(one.seconds, one.head) for one in with_falls(samples, events)]
    assert (113.0, 130) in heads
    assert (160.0, 125) in heads
    assert heads[-1] == (200.0, 120)


def test_the_death_is_never_after_the_resume_nor_made_up() -> None:
    samples = [sample(100.0, 0), sample(110.0, 10)]
    assert [one.seconds for one in with_falls(samples, [resumed(111.0, 10, 500)])][2:] == [111.0] * 3
    for event in (
        resumed(111.0, 10, 10),
        resumed(111.0, 10, "many"),
        resumed(90.0, 10, 50),
        Event("started", "never", 0),
    ):
        assert with_falls(samples, [event]) == samples
