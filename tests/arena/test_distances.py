"""Test what the arena knows about distances from copies."""

from __future__ import annotations

import numpy as np

from scarctl.arena.arena import Arena
from scarctl.arena.distances import from_memory, from_store
from scarctl.state.layout import TensorSpec, build_layout
from scarctl.state.version import pack
from tests.daemon.rig import acknowledge, copy_into

LAYOUT = build_layout([("w", "parameter", (TensorSpec("", "F32", (4, 2)),))], rows={"w": 1})


def test_what_the_store_has_is_at_no_distance() -> None:
    arena = Arena.anonymous(LAYOUT)
    assert np.isnan(from_store(arena)).all()
    every = np.arange(LAYOUT.partitions)
    assert copy_into(arena, every, pack(1, 5), 0)
    arena.note_distances(np.array([1.0, 2.0, np.nan, 4.0]))
    acknowledge(arena, every[:1])
    assert np.array_equal(from_store(arena), [0.0, 2.0, np.nan, 4.0], equal_nan=True)


def test_memory_is_as_the_values_were_but_for_what_its_newest_checkpoint_left_out() -> None:
    newest = np.array([pack(1, 5), pack(1, 4), -1, pack(1, 5)])
    assert np.array_equal(from_memory(newest), [0.0, np.nan, np.nan, 0.0], equal_nan=True)
    assert from_memory(np.empty(0, dtype=np.int64)).size == 0
