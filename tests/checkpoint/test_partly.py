"""Test looks that compare a quarter of the values: what they estimate, and that nothing escapes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scarctl.arena.arena import Arena
from scarctl.checkpoint.binding import layout_of, tensors_of
from scarctl.checkpoint.live_state import LiveState
from scarctl.checkpoint.partly import PARTS
from scarctl.checkpoint.tracker import AGAIN, Tracker
from scarctl.state.version import pack
from scarctl.store.settings import Settings
from scarctl_adapters.torch import TorchAdapter


class Dense:
    """A layer of 31 partitions, the last one short, whose copies in memory are as it began."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(512, 122, bias=False)
        adapter = TorchAdapter.build(model, [])
        self.layout = layout_of(adapter, Settings(rows=(("weight", 4),)))
        self.live = LiveState(
            self.layout, tensors_of(adapter, self.layout), Arena.anonymous(self.layout), frozenset()
        )
        self.live.save(np.arange(self.layout.partitions), self.live.arena.slot, pack(1, 1), 1)
        self.weight = model.weight.detach()
        self.tracker = Tracker(self.layout)

    @property
    def copies(self) -> np.ndarray:
        """The copy in memory: float32 of the layer's shape, a view."""
        return self.live.arena.rows(0, 0).view(np.float32).reshape(self.weight.shape)

    def look(self) -> tuple[np.ndarray, np.ndarray]:
        return self.tracker.look(self.live, thorough=False, partly=True)

    def measured(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the looks that have measured each part once."""
        return [self.look()] + [[self.look() for _ in range(AGAIN)][-1] for _ in range(1, PARTS)]


def test_distances_are_estimated_from_each_quarter_in_turn() -> None:
    dense = Dense()
    dense.weight += 0.01 * torch.randn_like(dense.weight)
    true, found = dense.live.distances(), dense.measured()
    assert dense.tracker.unread == {0}
    for distance, changed in found:
        assert changed.all()
        np.testing.assert_allclose(distance, true, rtol=0.2)
    squares = np.mean([distance**2 for distance, _ in found], axis=0)
    np.testing.assert_allclose(np.sqrt(squares), true, rtol=1e-4)  # together they read every value once


@pytest.mark.parametrize("column", [0, 511])
def test_a_partition_that_moved_elsewhere_is_found(column: int) -> None:
    dense = Dense()
    dense.weight += 0.01
    dense.weight[8:12] = torch.from_numpy(dense.copies[8:12].copy())
    dense.weight[9, column] += 1.0
    found = dense.measured()
    assert all(changed[2] for _, changed in found)
    assert sorted(round(float(distance[2]), 2) for distance, _ in found) == [1.0, 1.0, 1.0, 2.0]


def test_an_estimate_serves_for_some_looks_in_which_all_has_changed() -> None:
    dense = Dense()
    dense.weight += 0.01
    first, _ = dense.look()
    dense.weight[:] = torch.from_numpy(dense.copies.copy())
    for _ in range(AGAIN - 2):
        distance, changed = dense.look()
        assert changed.all()
        assert np.array_equal(distance, first)
        assert dense.tracker.unread == {0}
    distance, changed = dense.look()
    assert not changed.any()
    assert not distance.any()


def test_a_layer_of_which_little_moves_is_compared_completely() -> None:
    dense = Dense()
    dense.weight[5] += 1.0
    distance, changed = dense.look()
    assert not dense.tracker.unread
    assert np.array_equal(np.flatnonzero(changed), [1])
    np.testing.assert_allclose(distance, dense.live.distances(), rtol=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_not_copied_wherever_they_are(bad: float) -> None:
    dense = Dense()
    before = dense.copies.copy()
    dense.weight += 0.01
    dense.weight[41, 300] = bad
    for look in range(2 * AGAIN):
        distance, changed = dense.look()
        ids = np.flatnonzero(changed & np.isfinite(distance))
        left = dense.live.save(ids, dense.live.arena.slot, pack(1, 2 + look), 2 + look, dense.tracker.unread)
        kept = set(np.flatnonzero(~np.isfinite(distance)).tolist()) | set(left.tolist())
        assert kept == {10}
        dense.weight += 0.01
    copies = dense.copies
    assert np.array_equal(copies[40:44], before[40:44])
    assert not np.array_equal(copies[36:40], before[36:40])


def test_large_values_and_equal_infinities_are_copied() -> None:
    dense = Dense()
    dense.weight[0:4] = 3e38  # their sum overflows
    dense.weight[20, 0] = float("-inf")
    everything = np.arange(dense.layout.partitions)
    dense.live.save(everything, dense.live.arena.slot, pack(1, 2), 2)
    dense.weight[1:] += 0.01
    assert not dense.live.save(everything, dense.live.arena.slot, pack(1, 3), 3, frozenset({0})).size
    assert np.array_equal(dense.copies, dense.weight.numpy())
