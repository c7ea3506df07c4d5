"""Compare the arenas of one run on several hosts: the newest one is used."""

from __future__ import annotations

from typing import TypeAlias

from scarctl.arena.view import ArenaView
from scarctl.state.version import epoch_of, step_of

Age: TypeAlias = "tuple[int, int, int]"
"""Epoch of the newest copy, newest finished iteration, sum of the copies' steps. The greatest is the newest arena's."""


def age_of(view: ArenaView | None) -> Age | None:
    """Return the age of an arena that may move to another host; None if it has no copies, or its process lives."""
    if view is None or view.alive or not (view.version >= 0).any():
        return None
    steps = int(step_of(view.version[view.version >= 0]).sum())
    return int(epoch_of(view.version.max())), view.head_step, steps
