"""Test a loop over numpy arrays that puts new arrays into its dict: distances are those of the new arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import scarctl
from scarctl.checkpoint.tracker import SMALL
from scarctl.config import grouped
from scarctl.state.version import step_of

ROWS, ROW = 64, SMALL // 32
"""Twice as many bytes as needed for distances to be found between checkpoints."""


def test_what_moves_between_two_checkpoints_is_chosen(tmp_path: Path) -> None:
    # On a busy machine the store may still read what the checkpoint would copy: then it copies nothing.
    copied = next(filter(None, (_copied(tmp_path / str(number)) for number in range(5))), set())
    assert {3, 11} <= copied


def _copied(store: Path) -> set[int]:
    """Return the partitions of the checkpoint of step 12, after 3 and 11 have moved since the one before."""
    state = {"w": np.zeros((ROWS, ROW // 4), np.float32)}
    options = {"interval": 4, "fraction": 1 / 8, "partition_bytes": ROW, "flush_on_signal": False}
    session = scarctl.attach(state, store=store, **grouped(daemon=False, **options))
    session.resume()

    def step(*rows: int) -> None:
        new = state["w"].copy()
        for row in rows:
            new[row] += 1
        state["w"] = new
        session.step()
        look = session._saving._checkpoints._look
        if look is not None:
            look.settle(60)
        if session._engine is not None:  # what the store still reads is not copied again
            assert session._engine.saver.drain(60)

    step()
    for _ in range(7):
        step(40)
    for _ in range(5):
        step(3, 11)  # the next look compares them, and there is no other before the checkpoint
    engine = session._engine
    assert engine is not None
    assert engine.tracker.overlaps, "what is tested"
    session._finish()
    copied = set(np.flatnonzero(step_of(engine.arena.version) == 12).tolist())
    session.close(seal=False)
    return copied
