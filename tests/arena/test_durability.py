"""Test which copies in an arena count as durable: a seal lifts those of the store to its step, others are pending."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from scarctl.arena.durability import durability
from scarctl.state.version import NEVER, pack
from tests.arena.arenas import ALL, LAYOUT, create
from tests.daemon.rig import acknowledge, copy_into


def test_nothing_is_durable_at_first(tmp_path: Path) -> None:
    arena = create(tmp_path / "run")
    found = durability(arena)
    assert set(found.versions.tolist()) == {NEVER}
    assert (found.durable_step, found.oldest_durable_step, found.sealed_step) == (-1, -1, -1)
    assert (found.pending_partitions, found.pending_bytes) == (0, 0)
    arena.close()


def test_copies_wait_until_they_are_acknowledged(tmp_path: Path) -> None:
    arena = create(tmp_path / "run")
    assert copy_into(arena, ALL, pack(1, 4), 0)
    found = durability(arena)
    assert (found.pending_partitions, found.pending_bytes) == (LAYOUT.partitions, LAYOUT.nbytes)
    assert found.durable_step == -1
    acknowledge(arena, ALL[:3])
    found = durability(arena)
    assert found.pending_partitions == LAYOUT.partitions - 3
    assert found.pending_bytes == LAYOUT.nbytes - int(LAYOUT.partition_bytes[:3].sum())
    assert (found.durable_step, found.oldest_durable_step) == (4, -1), "some have no copy in the store"
    arena.close()


def test_a_seal_makes_older_copies_as_young_as_its_step(tmp_path: Path) -> None:
    """All live values were equal to their copies at the seal. A later copy keeps its own step."""
    arena = create(tmp_path / "run")
    for ids, step in ((ALL, 2), (ALL[1:], 5)):
        assert copy_into(arena, ids, pack(1, step), 0)
        acknowledge(arena, ids)
    assert durability(arena).oldest_durable_step == 2
    arena.seal(pack(1, 5))
    found = durability(arena)
    assert (found.durable_step, found.oldest_durable_step, found.sealed_step) == (5, 5, 5)
    assert copy_into(arena, ALL[:1], pack(1, 7), 0)
    acknowledge(arena, ALL[:1])
    found = durability(arena)
    assert found.versions[0] == pack(1, 7)
    assert np.all(found.versions[1:] == pack(1, 5))
    assert (found.durable_step, found.oldest_durable_step) == (7, 5)
    arena.close()
