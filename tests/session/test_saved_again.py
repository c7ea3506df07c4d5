"""Test that a mixed state, saved again as a whole before a step has ended, is still called mixed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

import scarctl
from tests.support import stepper
from tests.support.training import drained


def life(store: Path, arena: Path, steps: int, mode: Literal["partial", "auto"] = "auto") -> scarctl.Session:
    """Resume with new memory, and take these steps."""
    arena.mkdir()
    model, optimizer = stepper.build()
    session = stepper.attach(model, optimizer, str(store), arena_dir=str(arena), daemon=False)
    session.resume(mode=mode)
    for _ in range(steps):
        optimizer.step()
        session._saving.finish()
        drained([session])  # the store gets a part of every step that it is due one
    return session


def test_saving_a_mixed_state_again_without_a_step_does_not_make_it_consistent(tmp_path: Path) -> None:
    session = life(tmp_path / "first", tmp_path / "a", 12)
    shutil.copytree(tmp_path / "first", tmp_path / "s")
    session.close()
    reasons = []
    for name in "bcde":
        session = life(
            tmp_path / "s", tmp_path / name, int(name == "d"), "partial" if name == "b" else "auto"
        )
        assert session.resumed is not None
        reasons.append(session.resumed.reasons)
        session.close()
    mixed = ("partitions are of several steps",)
    again = ("it was restored like this, and no step has ended since: partitions are of several steps",)
    assert reasons == [mixed, again, again, ()], "the last but one life has taken a step"
