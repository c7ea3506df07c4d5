"""Test copies of live tensors in the arena: complete, or marked as being copied."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from scarctl.arena.arena import Arena
from scarctl.checkpoint.live_state import LiveState
from scarctl.state.layout import TensorSpec, build_layout

ROWS, SLOTS = 8, ("", "momentum")


@pytest.fixture
def state(arena_dir: Path) -> Iterator[LiveState]:
    """Yield a state of two groups of two partitions each, all values 1, with a copy of version 1."""
    specs = tuple(TensorSpec(slot, "F32", (ROWS, 4)) for slot in SLOTS)
    layout = build_layout(
        [("busy", "parameter", specs), ("quiet", "parameter", specs)], rows={"*": ROWS // 2}
    )
    arena = Arena.create(arena_dir / "run" / "x", layout, run_id="0" * 32, epoch=1)
    made = LiveState(layout, [[torch.ones(ROWS, 4) for _ in SLOTS] for _ in layout.groups], arena)
    made.save(np.arange(layout.partitions), arena.slot, 1, 1)
    assert arena.intact().all()
    yield made
    arena.remove()


def copies(state: LiveState, group: int) -> set[float]:
    """Return the values in the arena's copy of a group."""
    rows = [state.arena.rows(group, t).view(np.float32) for t in range(len(SLOTS))]
    return {float(value) for slot in rows for value in slot.flat}


def write_while_copied(state: LiveState, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Make training add one to every value of the first group, in the middle of each of its next copies."""
    copy, busy, left = torch._foreach_copy_, state.tensors[0], [times]

    def copying(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        copy(targets, sources)
        if sources[0].data_ptr() == busy[0].data_ptr() and left[0]:
            left[0] -= 1
            for tensor in busy:
                tensor.add_(1)

    monkeypatch.setattr(torch, "_foreach_copy_", copying)


def test_a_tensor_that_got_other_memory_is_copied_from_there(state: LiveState) -> None:
    state.tensors[1][0].data = torch.full((ROWS, 4), 5.0)
    state.save(np.arange(4), state.arena.slot, 2, 2)
    assert copies(state, 1) == {1.0, 5.0}


def test_what_is_written_to_all_the_time_is_no_copy(
    state: LiveState, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_while_copied(state, monkeypatch, times=1000)
    state.save(np.arange(4), state.arena.slot, 2, 2)
    assert state.arena.intact().tolist() == [False, False, True, True]
    assert copies(state, 1) == {1.0}
    monkeypatch.undo()
    state.save(np.arange(2), state.arena.slot, 3, 3)
    assert state.arena.intact().all()
    assert len(copies(state, 0)) == 1, "parameter and momentum are of one moment again"


def test_what_was_written_to_once_is_copied_again(state: LiveState, monkeypatch: pytest.MonkeyPatch) -> None:
    write_while_copied(state, monkeypatch, times=1)
    state.save(np.arange(4), state.arena.slot, 2, 2)
    assert state.arena.intact().all()
    assert copies(state, 0) == {2.0}
    assert state.arena.version.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("norm", ["l2", "rms", "relative"])
@pytest.mark.parametrize("shape", [(67, 4), (70, 1 << 13)])
def test_distances_of_some_are_those_of_all(shape: tuple[int, int], norm: str, arena_dir: Path) -> None:
    """Few partitions and many, gathered or in place, with a short last one, NaN, and equal infinities."""
    layout = build_layout([("table", "parameter", (TensorSpec("", "F32", shape),))], rows={"*": 4})
    arena = Arena.create(arena_dir / "run" / "x", layout, run_id="0" * 32, epoch=1)
    live = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    live[10, 1] = torch.inf
    state = LiveState(layout, [[live]], arena)
    state.save(np.arange(layout.partitions), arena.slot, 1, 1)
    live += 1
    live[20:31, 2] = torch.nan
    whole = state.distances(norm)
    assert np.flatnonzero(~np.isfinite(whole)).tolist() == [5, 6, 7]
    last = layout.partitions - 1
    for ids in ([], [0], [2, last], [5, 7], [1, 2, 3, 6, 7, 8, last], list(range(last + 1))):
        found = state.distances_at(np.array(ids, dtype=np.int64), norm)
        np.testing.assert_allclose(found, whole[ids], rtol=1e-5)
    arena.remove()
