"""Test what a survivor does with another rank's arena. Real ranks are in `test_replicas` and `test_sessions`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scarctl.adapter import StateGroup
from scarctl.arena.arena import Arena
from scarctl.arena.extras import read_extras
from scarctl.arena.folder import arena_folder
from scarctl.checkpoint.live_state import LiveState
from scarctl.config import SessionSettings
from scarctl.distributed.rescue import MOST, SECONDS, Looks, _bring_up
from scarctl.state.extras import Extras
from scarctl.state.layout import TensorSpec, build_layout
from scarctl.state.version import pack, step_of
from scarctl.store import Store
from tests.daemon.rig import copy_into
from tests.support.ranks import belong

pytestmark = pytest.mark.leaves_arena
LAYOUT = build_layout([(name, "parameter", (TensorSpec("", "U8", (4, 2)),)) for name in "ab"], rows={"a": 1})
ALL = np.arange(LAYOUT.partitions)
HELD = {"a": (0, 0, 4), "b": (1, 0, 4)}
WHOLE = "cd" * 16


class Dead:
    """The arena of a dead rank, of step 3, and a survivor with all of its rows of step 5. Bytes show the step."""

    def __init__(self, folder: Path) -> None:
        self.store = Store.create(str(folder / "store"), shards=2)
        self.view = self.store.of_shard(1)
        self.settings = SessionSettings(store=str(folder / "store"), arena_dir=str(folder))
        place = arena_folder(str(folder), self.view.run_id)
        self.arena = Arena.create(place, LAYOUT, run_id=self.view.run_id, epoch=1)
        belong(self.arena, self.view)
        self.live = [
            StateGroup(name, "parameter", {"": torch.full((4, 2), 5, dtype=torch.uint8)}) for name in "ab"
        ]

    def checkpoint(self) -> None:
        extras = Extras({"rng": None, "extras": {"step": 3}}).to_tree()
        assert copy_into(self.arena, ALL, pack(1, 3), 3, whole="ab" * 16, extras=extras)

    def rescue(self) -> bool:
        self.arena.close()
        extras = Extras({"rng": None, "extras": {"step": 5}})
        return _bring_up(self.view, self.settings, dict(HELD), self.live, 5, extras, WHOLE, (), late=True)

    def values(self) -> dict[str, set[int]]:
        return {name: set(np.unique(self.arena.rows(g, 0)).tolist()) for g, name in enumerate("ab")}

    def step_of_extras(self) -> Any:
        found = read_extras(self.arena)
        return None if found is None else found.tree["state"]["extras"]["step"]


@pytest.fixture
def dead(tmp_path: Path) -> Iterator[Dead]:
    made = Dead(tmp_path)
    yield made
    made.store.close()


def busy(patch: pytest.MonkeyPatch) -> None:
    """Have another thread write to "b" all the time, as far as torch counts."""
    real, count = LiveState.counters, itertools.count()
    patch.setattr(LiveState, "counters", lambda live, g: [next(count)] if g == 1 else real(live, g))


@pytest.mark.parametrize("blank", [True, False])
def test_a_survivor_with_all_rows_completes_its_step(dead: Dead, blank: bool) -> None:
    if not blank:
        dead.checkpoint()
    assert dead.rescue()
    assert (dead.values(), dead.arena.whole, dead.step_of_extras()) == ({"a": {5}, "b": {5}}, WHOLE, 5)


def test_rows_that_another_thread_writes_to_stay_as_they_were(
    dead: Dead, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead.checkpoint()
    busy(monkeypatch)
    assert dead.rescue()
    assert dead.arena.intact().all()
    assert (dead.values(), dead.arena.whole, dead.step_of_extras()) == ({"a": {5}, "b": {3}}, "", 3)
    assert set(step_of(dead.arena.version).tolist()) == {3, 5}


def test_a_state_with_rows_that_nobody_has_is_no_state(dead: Dead, monkeypatch: pytest.MonkeyPatch) -> None:
    busy(monkeypatch)
    assert not dead.rescue()
    assert not dead.arena.slot.moment
    assert not dead.arena.intact().any()


def test_an_arena_without_copies_from_its_owner_is_looked_at_for_a_moment() -> None:
    looks = Looks(100.0)
    assert not looks.last(0, 100.0)
    assert not looks.last(0, 100.0 + SECONDS)
    assert looks.last(0, 100.1 + SECONDS)


def test_a_replica_is_left_to_its_owner_until_it_has_not_changed_for_a_while() -> None:
    """A copy that comes at the very end counts, too."""
    looks = Looks(100.0)
    assert not looks.last(7, 100.3)
    assert not looks.last(8, 100.4 + SECONDS), "it has just received a copy"
    assert not looks.last(8, 100.4 + 2 * SECONDS)
    assert looks.last(8, 100.5 + 2 * SECONDS)


@pytest.mark.parametrize(("grace", "most"), [(None, MOST), (1000.0, MOST), (25.0, 2.5), (2.0, SECONDS)])
def test_a_replica_that_never_rests_is_taken_at_last(grace: float | None, most: float) -> None:
    """Most of a grace period is for the evacuation, which comes afterwards."""
    looks = Looks(100.0, grace)
    pause = SECONDS / 4
    assert not any(looks.last(n + 1, 100.0 + n * pause) for n in range(int(most / pause)))
    assert looks.last(99, 100.1 + most)
