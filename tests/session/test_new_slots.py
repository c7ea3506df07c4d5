"""Test that a resume reads copies from the store directly into new slots, and leaves no slots behind if it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import scarctl
from scarctl.arena.arena import Arena
from scarctl.checkpoint import live_state
from scarctl.checkpoint.live_state import LiveState
from scarctl.checkpoint.loading import NewSlots
from scarctl.checkpoint.row_copies import copy_rows
from scarctl.errors import NoIntactCopy
from tests.support.training import state_of

State = dict[str, torch.Tensor]


class Run:
    """A model of two layers with AdamW, one of which is large enough for several partitions."""

    def __init__(self, store: Path, seed: int, host: str = "first") -> None:
        (store.parent / host).mkdir(exist_ok=True)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(300, 700), nn.Linear(700, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.session = scarctl.attach(
            self.model,
            self.optimizer,
            store=store,
            interval=1 << 30,
            partitioning=scarctl.Partitioning(partition_bytes=100_000),
            settings=scarctl.Settings(daemon=False, arena_dir=store.parent / host),
        )

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(4, 300)).square().sum().backward()
        self.optimizer.step()

    def state(self) -> State:
        return state_of(self.model, self.optimizer)


def saved(store: Path, steps: int = 3) -> State:
    """Return the state of a run that has ended."""
    run = Run(store, seed=1)
    for _ in range(steps):
        run.step()
    run.session.close()
    return run.state()


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_slots_are_not_copied_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved(tmp_path / "store")
    had: list[tuple[bool, int]] = []
    have = NewSlots.have
    copied: list[object] = []

    def watched(self: NewSlots, arena: Arena) -> NDArray[np.bool_]:
        found = have(self, arena)
        had.append((bool(found.all()), len(self.rows)))
        return found

    def counted(target: torch.Tensor, *args: Any) -> None:
        copied.append(target)
        copy_rows(target, *args)

    monkeypatch.setattr(NewSlots, "have", watched)
    run = Run(tmp_path / "store", seed=2, host="second")
    with monkeypatch.context() as patch:
        patch.setattr(live_state, "copy_rows", counted)
        assert run.session.resume().consistent
    assert same(run.state(), before)
    assert had == [(True, 8)], "two slots of four parameters"
    assert len(copied) == 4, "the parameters alone"
    run.step()
    run.session.checkpoint(full=True, wait=True)
    report = run.session.recover("all")
    assert report.restored_partitions
    assert len(had) == 1, "after the resume nothing is new any more"
    run.session.close()


def test_a_slot_that_has_another_copy_than_the_arena_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved(tmp_path / "store")
    load = LiveState.load

    def spoiled(self: LiveState, ids: object) -> None:
        # Another rank's rescue may bring newer copies into the arena before they are loaded.
        assert self.new_slots is not None
        self.arena.begin(ids)  # type: ignore[arg-type]
        self.arena.end(ids, int(self.arena.version[0]))  # type: ignore[arg-type]
        for rows in self.new_slots.rows.values():
            rows[:] = 255
        load(self, ids)  # type: ignore[arg-type]

    monkeypatch.setattr(LiveState, "load", spoiled)
    run = Run(tmp_path / "store", seed=2, host="second")
    run.session.resume()
    assert same(run.state(), before)
    run.session.close(seal=False)


def test_a_failed_resume_leaves_no_slot_and_no_value(tmp_path: Path) -> None:
    saved(tmp_path / "store")
    for path in (tmp_path / "store").glob("shards/*/seg/*"):
        data = bytearray(path.read_bytes())
        # The largest tensors come first: the last bytes before the tail belong to the smallest.
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    run = Run(tmp_path / "store", seed=2, host="second")
    before = run.state()
    with pytest.raises(NoIntactCopy):
        run.session.resume()
    assert same(run.state(), before), "the parameters are as they were, and there are no slots"
    assert not any(run.optimizer.state.values())
    run.session.close(seal=False)
