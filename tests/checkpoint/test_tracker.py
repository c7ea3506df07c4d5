"""Test trackers: estimated or remembered distances against measured ones, with tables that are really trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scarctl.arena.arena import Arena
from scarctl.checkpoint.binding import layout_of, tensors_of
from scarctl.checkpoint.live_state import LiveState
from scarctl.checkpoint.tracker import Tracker
from scarctl.state.version import pack
from scarctl.store import Settings
from scarctl_adapters.torch import TorchAdapter

NOTHING = np.empty(0, dtype=np.int64)


class Table:
    """A table that is trained, the rows that its gradients name, and a copy of it with a tracker."""

    def __init__(
        self, kind: str, *, sparse: bool = True, rows: int = 1, norm: Any = "l2", **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.EmbeddingBag(4000, 4, mode="sum", sparse=sparse)
        optimizer = options.pop("optimizer", torch.optim.SparseAdam if sparse else torch.optim.Adam)
        self.optimizer = optimizer(self.model.parameters(), **{"lr": 0.1, **options})
        self.adapter = TorchAdapter.build(self.model, [self.optimizer])
        self.norm = norm
        self.step_number = 0
        self.train([0])
        self.layout = layout_of(self.adapter, Settings(rows=(("weight", rows),)))
        self.arena = Arena.anonymous(self.layout)
        self.tracker = Tracker(self.layout, kind, norm)
        self.live = LiveState(self.layout, tensors_of(self.adapter, self.layout), self.arena)
        self.save(np.arange(self.layout.partitions))

    def train(self, rows: list[int]) -> None:
        self.step_number += 1
        self.optimizer.zero_grad()
        self.model(torch.tensor([rows])).square().sum().backward()
        if hasattr(self, "tracker"):
            self.tracker.touch(self.adapter.touched_rows(dense=True))
        self.optimizer.step()

    def save(self, ids: np.ndarray) -> None:
        self.live.save(ids, pack(1, self.step_number))
        self.tracker.saved(ids)

    def look(self) -> np.ndarray:
        return self.tracker.distances(self.live, self.step_number)

    def exact(self) -> np.ndarray:
        return self.live.distances(self.norm)


@settings(max_examples=30)
@given(
    sparse=st.booleans(),
    per_partition=st.sampled_from([1, 3]),
    steps=st.lists(
        st.one_of(
            st.lists(st.integers(0, 3999), min_size=1, max_size=12),
            st.sets(st.integers(0, 1333), max_size=9),
            st.none(),
        ),
        max_size=12,
    ),
)
def test_touched_is_exact_where_only_rows_with_gradients_move(
    sparse: bool, per_partition: int, steps: list[Any]
) -> None:
    """Steps, saves of some partitions, and comparisons in any order; rows are named once or several times in a step."""
    table = Table("touched", sparse=sparse, rows=per_partition, optimizer=torch.optim.SGD)
    for step in steps:
        if step is None:
            np.testing.assert_allclose(table.look(), table.exact(), rtol=1e-4)
        elif isinstance(step, set):
            table.save(np.array(sorted(step), dtype=np.int64))
        else:
            table.train(step)
    np.testing.assert_allclose(table.look(), table.exact(), rtol=1e-4)


def test_marks_are_those_of_a_recount() -> None:
    rng = np.random.default_rng(0)
    for sparse in (True, False):
        table = Table("touched", sparse=sparse, rows=3, optimizer=torch.optim.SGD)
        table.train([1])
        table.look()
        touches = table.tracker._touches[0]
        expected = np.zeros(table.layout.partitions, dtype=bool)
        for _ in range(20):
            rows = rng.integers(4000, size=8).tolist()
            table.train(rows)
            expected[np.array(rows) // 3] = True
            assert np.array_equal(touches.marked(), expected)
        saved = np.flatnonzero(expected)[::2]
        table.save(saved)
        expected[saved] = False
        assert np.array_equal(touches.marked(), expected)
        table.look()
        assert not touches.marked().any()


@pytest.mark.parametrize("options", [{"weight_decay": 0.1}, {"momentum": 0.9}])
def test_touched_compares_the_whole_table_where_the_optimizer_moves_other_rows(
    options: dict[str, float],
) -> None:
    table = Table("touched", sparse=False, optimizer=torch.optim.SGD, **options)
    table.train(list(range(2000)))
    table.look()
    table.train([5])  # weight decay moves all rows, momentum half of them
    assert table.tracker._touches[0].marked().sum() <= 2
    np.testing.assert_allclose(table.look(), table.exact(), rtol=1e-4)
    assert np.count_nonzero(table.exact()) > 1000


def test_a_few_rows_that_somebody_writes_to_are_found_in_time() -> None:
    table = Table("touched")
    table.train([1])
    table.look()
    with torch.no_grad():
        table.model.weight[100:110] += 1
    for _ in range(200):
        table.train([1])
        found = table.look()
    assert found[100:110].all()


def test_touched_with_a_norm_of_the_users() -> None:
    def weighted(now: Any, then: Any) -> torch.Tensor:
        return ((now[""] - then[""]).abs() * now["exp_avg_sq"]).sum(dim=1)

    table = Table("touched", norm=weighted)
    for rows in ([1, 2], [2, 3, 3], [7]):
        table.train(rows)
        np.testing.assert_allclose(table.look(), table.exact(), rtol=1e-4)


@pytest.mark.parametrize("kind", ["touched", "auto"])
def test_a_spoiled_copy_is_looked_at_again(kind: str) -> None:
    table = Table(kind)
    table.train([1])
    table.look()
    table.live._saved[0][0][50] += 1
    table.tracker.moved(np.array([50]))
    assert table.look()[50] == pytest.approx(2.0)


def wide(kind: str, norm: str = "l2", values: int = 4096, rows: int = 64) -> tuple[Tracker, LiveState]:
    """Return a matrix in which later rows have moved further."""
    torch.manual_seed(0)
    model = torch.nn.Linear(values, rows, bias=False)
    adapter = TorchAdapter.build(model, [])
    layout = layout_of(adapter, Settings(rows=(("weight", 1),)))
    arena = Arena.anonymous(layout)
    live = LiveState(layout, tensors_of(adapter, layout), arena)
    live.save(np.arange(layout.partitions), pack(1, 1))
    with torch.no_grad():
        model.weight += torch.rand(rows, values) * torch.arange(rows)[:, None]
    return Tracker(layout, kind, norm, seed=3), live


@pytest.mark.parametrize("norm", ["l2", "rms", "relative"])
def test_sampled_estimates_every_norm(norm: str) -> None:
    tracker, live = wide("sampled", norm)
    looks = [np.square(tracker.distances(live, 10)) for _ in range(16)]
    np.testing.assert_allclose(np.mean(looks, axis=0), np.square(live.distances(norm)), rtol=1e-3)
    assert not np.array_equal(looks[0], looks[1])


def test_relative_follows_the_copies() -> None:
    tracker, live = wide("sampled", "relative")
    tracker.distances(live, 1)
    ids = np.array([5, 60])
    live.save(ids, pack(1, 2))
    tracker.saved(ids)
    with torch.no_grad():
        live.tensors[0][0].mul_(2)
    looks = [np.square(tracker.distances(live, 10)) for _ in range(16)]
    np.testing.assert_allclose(np.mean(looks, axis=0), np.square(live.distances("relative")), rtol=1e-3)


def test_narrow_rows_are_never_sampled() -> None:
    for kind in ("sampled", "auto"):
        tracker, live = wide(kind, values=4095)
        assert np.array_equal(tracker.distances(live, 1), live.distances())


def test_what_is_chosen_is_checked_exactly_and_watched_until_it_is_good() -> None:
    tracker, live = wide("sampled")
    unseen = 0
    while True:  # a value that is not sampled in this turn
        with torch.no_grad():
            before = live.tensors[0][0][63, unseen].item()
            live.tensors[0][0][63, unseen] = torch.nan
        distance = tracker.distances(live, 10)
        if np.isfinite(distance).all():
            break
        with torch.no_grad():
            live.tensors[0][0][63, unseen] = before
        unseen += 1
    ids, bad = tracker.check(live, np.array([2, 63]), distance)
    assert ids.tolist() == [2]
    assert bad.tolist() == [63]
    assert distance[2] == pytest.approx(live.distances()[2])
    for _ in range(3):
        assert np.isnan(tracker.distances(live, 10)[63])
    with torch.no_grad():
        live.tensors[0][0][63, unseen] = before
    assert np.isfinite(tracker.distances(live, 10)).all()


def test_what_was_written_while_a_table_was_frozen_is_known_when_it_is_trained_again() -> None:
    table = Table("touched", optimizer=torch.optim.SGD)
    table.train([5])
    table.look()
    trained, table.live = table.live, table.live.with_tensors({}, frozenset({0}))
    with torch.no_grad():
        table.model.weight[7] += 1
    np.testing.assert_allclose(table.look(), table.exact(), rtol=1e-4)
    table.live = trained
    table.train([9])
    np.testing.assert_allclose(table.look(), table.exact(), rtol=1e-4)


def test_a_frozen_group_that_somebody_writes_to_at_every_step_is_sampled_like_others() -> None:
    """A teacher follows its student as an average."""
    table = Table("sampled", rows=4000)
    table.live = table.live.with_tensors({}, frozenset({0}))
    compared: list[int] = []
    whole = table.live.group_distances
    table.live.group_distances = lambda g, *rest: compared.append(g) or whole(g, *rest)  # type: ignore[method-assign, func-returns-value]
    for _ in range(3):
        with torch.no_grad():
            table.model.weight.mul_(0.9)
        table.step_number += 1
        assert table.look().any()
    assert not compared
    table.look()
    assert compared
