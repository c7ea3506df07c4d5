"""Find the state that all ranks have in memory, after all of them were killed.

Ranks copy the state after the same steps, and each makes its copy current by itself. So some may have a newer state
than others at a kill, and those have the state before in their other slot. A rank that ended otherwise has its last
iteration: then the others join it, see `scarctl.distributed.resume_step`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from scarctl.arena.arena import Arena
from scarctl.arena.extras import read_extras
from scarctl.state.version import step_of

if TYPE_CHECKING:
    from scarctl.distributed.collectives import Team

log = logging.getLogger("scarctl")


def agree_in_memory(arena: Arena, team: Team) -> None:
    """Make the newest state that the arenas of all ranks have the newest one of this rank's. A collective.

    Does nothing if there is no such state, or if a rank copied its last iteration when it ended.
    """
    ended = bool(arena.last) and arena.last == arena.slot.moment
    found = [read_extras(arena, slot.number) for slot in arena.complete_states()]
    names = [extras.whole for extras in found if extras is not None and extras.tree is not None]
    everyone = team.gather([ended, names])
    if any(other for other, _ in everyone):
        return
    first, *others = [theirs for _, theirs in everyone]
    common = next((name for name in first if all(name in theirs for theirs in others)), "")
    if common and common != arena.whole:
        newer = step_of(arena.slot.head)
        arena.go_back()
        log.info(
            "rank %d continues from its state of step %d in memory, which all ranks have; it also had step %d",
            team.rank,
            step_of(arena.slot.head),
            newer,
        )
