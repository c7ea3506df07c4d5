"""Test the numbers of a survey: lines of shards and partitions, ages, ranks."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import scarctl
from scarctl.arena.arena import Arena
from scarctl.arena.folder import arena_folder
from scarctl.errors import Corruption
from scarctl.ops.ages import Age
from scarctl.ops.health import AT_RISK, LOSING, health_of
from scarctl.ops.survey import survey
from scarctl.ops.surveyed import Survey
from scarctl.state.caveats import Caveat
from scarctl.state.layout import Layout, TensorSpec, build_layout
from scarctl.state.layouts import Layouts
from scarctl.state.version import pack
from scarctl.store import Store
from scarctl.theory.history import History
from scarctl.theory.rework import Outlook, mean_age, rework_of_loss
from tests import golden
from tests.daemon.rig import acknowledge, copy_into
from tests.support.ranks import RankStore, belong, layout_of


@pytest.mark.parametrize("known", [True, False], ids=["distances known", "ages only"])
def test_every_line_is_what_counting_gives(known: bool) -> None:
    rng, step, since = np.random.default_rng(0), 100, 3
    layout = build_layout(
        [
            (f"g{n}", kind, (TensorSpec("", "F32", (n + 3, 2)),))
            for n, kind in enumerate(["parameter", "buffer"] * 8)
        ],
        rows={"*": 2},
    )
    count = layout.partitions
    # A damaged store may name any shard: no array is as long as the highest number.
    shard_of = rng.choice(np.array([0, 3, 70_000, 2**31 - 1], np.int32), count)
    saved = rng.integers(-1, step, count)
    distance = np.where(known, rng.integers(0, 5, count) / 4, np.nan)
    outlook = Outlook.of(step, [History((k, 5, 0.97**k) for k in range(0, 100, 5))])
    view = Survey(
        "s",
        step,
        Layouts([layout]),
        shard_of,
        saved,
        distance,
        usage={},
        age=Age(None, is_lower_bound=False),
        outlook=outlook,
        comparable=True,
        since=since,
    )
    parameter = np.array([layout.groups[g].kind == "parameter" for g in layout.group_of(np.arange(count))])
    assert [line.shard for line in view.shards] == np.unique(shard_of).tolist()
    for line in view.shards:
        mine = shard_of == line.shard
        lost = mine & parameter
        ages = np.where(saved < 0, 0, step - saved)[lost]
        assert line.partitions == mine.sum()
        assert line.bytes == layout.partition_bytes[mine].sum()
        assert line.never_saved == (saved[mine] < 0).sum()
        assert (line.oldest_step, line.newest_step) == (saved[mine & (saved >= 0)].min(), saved[mine].max())
        assert line.share == lost.sum() / parameter.sum()
        norm = float(np.linalg.norm(distance[lost])) if known else None
        age = mean_age(distance[lost], ages) if known else None
        wanted = rework_of_loss(outlook, norm, ages, line.share, age=age, since=since)
        assert wanted.iterations is not None
        assert line.rework.basis == wanted.basis
        assert line.rework.iterations == pytest.approx(wanted.iterations)
        assert (line.rework.low, line.rework.high) == pytest.approx((wanted.low, wanted.high))
    of = layout.group_of(np.arange(count))
    assert [layer.name for layer in view.layers] == [group.name for group in layout.groups]
    for g, layer in enumerate(view.layers):
        steps, differs = saved[of == g], distance[of == g] != 0
        assert (layer.partitions, layer.bytes) == (steps.size, layout.groups[g].nbytes)
        assert layer.oldest == (None if (steps < 0).any() else step - steps.min())
        changed_steps = steps[differs]
        wanted_age = step - changed_steps.min() if changed_steps.size else 0
        assert layer.oldest_changed == (None if (changed_steps < 0).any() else wanted_age)
    ages = [layer.oldest_changed for layer in view.stalest_layers(5)]
    order = [math.inf if age is None else age for age in ages]
    assert order == sorted(order, reverse=True)
    assert len(order) == 5
    assert order[-1] >= max((x.oldest_changed or 0) for x in view.layers if x not in view.stalest_layers(5))
    names = [line["name"] for line in view.partitions(np.arange(count))]
    for few in (0, 3, count, count + 5):
        stalest = [names[i] for i in np.argsort(saved, kind="stable")[:few]]
        assert [line["name"] for line in view.stalest(few)] == stalest
        changed = [i for i in np.argsort(-distance, kind="stable") if distance[i] > 0]
        assert [line["name"] for line in view.most_changed(few)] == [names[i] for i in changed[:few]]


def test_a_process_alone_counts_as_the_only_rank(tmp_path: Path) -> None:
    made = RankStore(tmp_path / "store", 1)
    made.save(3)
    made.save(5, every=2)
    made.close()
    rank = survey(Store.open(made.path), None).to_json(None)
    shutil.rmtree(made.path / "topology")
    alone = survey(Store.open(made.path), None).to_json(None)
    [line] = rank["ranks"]
    assert (line["rank"], line["staleness"], line["durable_step"]) == (0, 2, 5)
    assert rank.keys() - alone.keys() == {"topology", "ranks", "other_shards"}
    changing = {"store", "saved_seconds_ago"}  # one file less; some seconds later
    assert all(alone[name] == rank[name] for name in alone.keys() - changing)
    assert alone["shards"] == [{name: line[name] for name in alone["shards"][0]}]


def arena_of(store: Store, base: Path, layout: Layout) -> Arena:
    """Return the arena of a run of this process, at step 40."""
    arena = Arena.create(arena_folder(str(base), store.run_id), layout, run_id=store.run_id, epoch=1)
    belong(arena, store)
    arena.reach(40)
    return arena


@pytest.mark.leaves_arena
def test_a_run_that_has_saved_nothing_yet(tmp_path: Path, arena_dir: Path) -> None:
    store, layout = Store.create(tmp_path / "store", shards=2), layout_of(0, 1)
    arena_of(store, arena_dir, layout).close()
    view = survey(store, str(arena_dir))
    assert (view.step, view.age) == (40, Age(None, is_lower_bound=False))
    assert view.run is not None
    assert view.run.alive
    assert view.saved_step.tolist() == [-1] * layout.partitions
    assert [line.never_saved for line in view.shards] == [line.partitions for line in view.shards]
    assert len(view.shards) == 2


@pytest.mark.leaves_arena
def test_an_arena_of_another_layout_says_nothing_of_the_store(tmp_path: Path, arena_dir: Path) -> None:
    made = RankStore(tmp_path / "store", 1)
    made.save(3)
    made.close()
    shutil.rmtree(made.path / "topology")
    store = Store.open(made.path)
    arena_of(store, arena_dir, layout_of(0, 2)).close()
    view = survey(store, str(arena_dir))
    assert (view.step, view.run, view.age.is_lower_bound) == (3, None, True)
    assert np.isnan(view.distance).all()


@pytest.mark.leaves_arena
def test_memory_that_is_newer_than_the_store_is_no_alarm(tmp_path: Path, arena_dir: Path) -> None:
    layout = layout_of(0, 1)
    made = RankStore(tmp_path / "store", 1)
    made.save(3)
    made.close()
    shutil.rmtree(made.path / "topology")
    store = Store.open(made.path)
    arena = arena_of(store, arena_dir, layout)
    every = np.arange(layout.partitions)
    assert copy_into(arena, every, pack(1, 30), 0)
    acknowledge(arena, every)
    arena.seal(pack(1, 35))
    assert copy_into(arena, every[:1], pack(1, 38), 1)
    arena.slot.stamp(arena.slot.moment, pack(1, 39), "ab" * 16)
    arena.note_distances(0.0, every)
    view = survey(store, str(arena_dir))
    assert view.run is not None
    # What the copy of step 30 has was found unchanged at step 35, and all of memory is as it was at step 39.
    assert (view.run.memory_age, view.run.pending_partitions, view.run.lag_steps) == (1, 1, 5)
    health = health_of(view, [])
    assert health.well
    assert health.losses["process"].steps == 1
    assert health.losses["host"].steps == 37
    # What equals its copy in memory may differ from the store's.
    assert view.stalest_layers(9)[0].oldest_changed == 37
    arena.note_errors(1)
    assert health_of(survey(store, str(arena_dir)), []).well, "the store is not late"
    late = replace(survey(store, str(arena_dir)), age=Age("2020-01-01T00:00:00+00:00", is_lower_bound=False))
    assert [found.kind for found in health_of(late, []).findings] == ["errors"]
    assert health_of(replace(late, max_lag=1e9), []).well, "this run lets the store be older"
    (stuck,) = health_of(replace(late, memory_seconds=100.0), []).findings
    assert (stuck.kind, stuck.severity) == ("memory-late", LOSING)
    assert "the newest checkpoint in memory is 100 s old" in stuck.message
    assert late.run is not None
    waits = replace(late, memory_seconds=100.0, run=replace(late.run, interval=1))
    assert [found.kind for found in health_of(waits, []).findings] == ["errors"], "no step was left out"
    slow = replace(view, caveats=(Caveat("turn", "the store takes 20 min for all that has changed"),))
    assert health_of(slow, []).severity == AT_RISK
    acknowledge(arena, every[:1])
    all_there = survey(store, str(arena_dir)).run
    assert all_there is not None
    assert (all_there.memory_age, all_there.pending_partitions, all_there.lag_steps) == (1, 0, 0)
    arena.close()


def test_a_run_that_is_alive_knows_its_step(tmp_path: Path, arena_dir: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with scarctl.attach(
        model, optimizer, store=tmp_path / "run", settings=scarctl.Settings(daemon=False, arena_dir=arena_dir)
    ) as session:
        session.resume()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        session.checkpoint(full=True, wait=True)
        view = survey(Store.open(tmp_path / "run"), str(arena_dir))
        assert view.to_json(0)["age_is_lower_bound"] is False
        assert view.run is not None
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
    away = survey(Store.open(tmp_path / "copy"), str(arena_dir))
    assert away.to_json(0)["age_is_lower_bound"] is True


def test_a_damaged_layout_is_read_once_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(shutil.copytree(Path(golden.__file__).parent / "1" / "kept", tmp_path / "kept"))
    [path] = (tmp_path / "kept" / "layout").glob("[0-9a-f]*.json")
    path.write_bytes(b"{}")
    read, names = store.blobs.read, list[str]()

    def counted(name: str, most: int) -> bytes:
        names.append(name)
        return read(name, most)

    monkeypatch.setattr(store.blobs, "read", counted)
    with pytest.raises(Corruption, match=path.name):
        survey(store, None)
    assert names.count(f"layout/{path.name}") == 1


def test_caveats_of_a_flush_that_only_memory_has(tmp_path: Path, arena_dir: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = scarctl.Settings(daemon=False, arena_dir=arena_dir)
    with scarctl.attach(model, optimizer, store=tmp_path / "run", settings=settings) as session:
        session.resume()
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        session.checkpoint(full=True, wait=True)
        session._saver.stop()
        session.caveats.say("swapped", "the data were swapped")
        session.caveats.say("behind", "the store is behind")
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        assert session.flush()
        store = Store.open(tmp_path / "run")
        assert "swapped" in [caveat.kind for caveat in survey(store, str(arena_dir)).caveats]
        session._saver.resume()
