"""Test that a look finds all that has changed, also in groups of which it compares only a part."""

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
from scarctl.checkpoint.tracker import _TURNS, Tracker
from scarctl.state.version import pack
from scarctl.store.settings import Settings
from scarctl_adapters.torch import TorchAdapter

ROWS = 4000


class Table:
    """A table that is trained with sparse gradients, copied into memory at every look."""

    def __init__(
        self, *, per: int = 1, norm: Any = "l2", frozen: bool = False, optimizer: Any = None
    ) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.EmbeddingBag(ROWS, 4, mode="sum", sparse=True)
        self.optimizer = (optimizer or torch.optim.SparseAdam)(self.model.parameters(), lr=0.1)
        self.adapter = TorchAdapter.build(self.model, [self.optimizer])
        self.norm, self.step = norm, 0
        self.compared = 0
        """Groups of which the newest look has compared everything."""
        self.train([0])
        self.layout = layout_of(self.adapter, Settings(rows=(("weight", per),)))
        self.arena = Arena.anonymous(self.layout)
        self.tracker = Tracker(self.layout, norm)
        tensors = tensors_of(self.adapter, self.layout)
        self.live = LiveState(self.layout, tensors, self.arena, frozenset({0}) if frozen else frozenset())
        self.everything = np.arange(self.layout.partitions)
        self.live.save(self.everything, self.live.arena.slot, pack(1, 1), 1)
        whole = self.live.groups_distances

        def counted(groups: Any, *rest: Any) -> Any:
            self.compared += len(groups)
            return whole(groups, *rest)

        self.live.groups_distances = counted  # type: ignore[method-assign, assignment]
        self.train([0])
        self.look()  # from now on it knows that all copies are equal

    @property
    def weight(self) -> torch.Tensor:
        return self.model.weight.detach()

    def train(self, rows: list[int]) -> None:
        self.optimizer.zero_grad()
        self.model(torch.tensor([rows])).square().sum().backward()
        if hasattr(self, "tracker"):
            self.tracker.touch(self.adapter.touched_rows(dense=False))
        self.optimizer.step()

    def look(self, *, thorough: bool = False, save: bool = True) -> tuple[np.ndarray, np.ndarray]:
        self.compared = 0
        found = self.tracker.look(self.live, thorough=thorough)
        self.step += 1
        if save:
            self.live.save(np.flatnonzero(found[1]), self.live.arena.slot, pack(1, self.step), self.step)
            self.tracker.copied()
        return found

    def check(self, **options: bool) -> None:
        """Assert that a look finds what has changed."""
        distance, changed = self.live.distances(self.norm), self.live.changed()
        found = self.look(**options)
        np.testing.assert_allclose(found[0], distance, rtol=1e-4)
        assert np.array_equal(found[1], changed)


@settings(max_examples=10)
@given(
    per=st.sampled_from([1, 3]),
    steps=st.lists(st.none() | st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=12), max_size=8),
)
def test_a_table_is_compared_only_where_it_has_gradients(per: int, steps: list[Any]) -> None:
    table = Table(per=per, optimizer=torch.optim.SGD)
    for rows in [*steps, None]:
        table.check() if rows is None else table.train(rows)
    assert not table.compared


def test_slots_count_though_the_parameter_has_not_moved() -> None:
    table = Table()
    table.train([1])
    table.look()
    table.live.tensors[0][1][1] += 1
    table.tracker.touch({"weight": torch.tensor([1])})
    distance, changed = table.look()
    assert (distance[1], changed[1], changed.sum()) == (0, True, 1)


def test_if_most_rows_have_gradients_all_are_compared() -> None:
    table = Table()
    table.train(list(range(ROWS // 2)))
    table.check()
    assert table.compared == 1


def test_a_table_that_somebody_writes_to_beside_the_gradients_is_compared_like_others() -> None:
    table = Table()
    table.weight[100:200] += 1
    for _ in range(20):
        table.train([1])
        table.look()
    assert not table.live.changed().any()
    table.weight[7] += 1
    table.train([1])
    table.check()


def test_a_thorough_look_compares_everything() -> None:
    for frozen in (False, True):
        table = Table(frozen=frozen)
        table.model.weight.data[9] += 1
        table.check(thorough=True)


def test_a_norm_of_the_users() -> None:
    def weighted(now: Any, then: Any) -> torch.Tensor:
        found: torch.Tensor = ((now[""] - then[""]).abs() * now["exp_avg_sq"]).sum(dim=1)
        return found

    table = Table(norm=weighted)
    for rows in ([1, 2], [2, 3, 3], [7]):
        table.train(rows)
        table.check()


@pytest.mark.parametrize("frozen", [False, True])
def test_copies_that_were_given_up_are_compared_again(frozen: bool) -> None:
    """Without a write: somebody has changed the copy."""
    table = Table(frozen=frozen)
    table.live._saved[0][0][50] += 1
    table.tracker.moved(np.array([50]))
    assert table.look()[0][50] == pytest.approx(2.0)


def test_values_that_are_not_finite_are_found_until_they_are() -> None:
    table = Table()
    table.train([5])
    table.weight[5] = torch.nan
    for _ in range(2):
        distance, changed = table.look(save=False)
        assert (np.flatnonzero(~np.isfinite(distance)).tolist(), changed[5]) == ([5], True)
    table.weight[5] = 0.0
    table.check()


def test_a_frozen_group_is_compared_only_after_a_write_that_torch_counts() -> None:
    table = Table(frozen=True, optimizer=torch.optim.SGD)
    table.check()
    for compared in (0, 0):
        table.check()
        assert table.compared == compared
    with torch.no_grad():
        table.model.weight[7] += 1
    for compared in (1, 1, 0):  # once more after it was copied
        table.check()
        assert table.compared == compared


def test_a_write_to_a_frozen_group_that_torch_does_not_count_is_found_in_time() -> None:
    table = Table(frozen=True, per=30)
    table.model.weight.data[3999] += 1
    looks = [table.look()[1].any() for _ in range(_TURNS)]
    assert sum(looks) == 1
    table.model.weight.data.mul_(2)
    table.check()  # any partition shows it


def test_a_frozen_group_that_is_trained_again_is_compared() -> None:
    table = Table(optimizer=torch.optim.SGD)
    trained, table.live = table.live, table.live.with_tensors({}, frozenset({0}))
    with torch.no_grad():
        table.model.weight[7] += 1
    table.check()
    table.live = trained
    table.train([9])
    table.check()
