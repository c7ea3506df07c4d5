"""Read the notes that one process saved with a state: in its memory, or in the store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scarctl.arena.arena import Arena
from scarctl.arena.extras import read_extras
from scarctl.errors import Corruption
from scarctl.state.extras import Notes
from scarctl.store import ShardState, Store

UNKNOWN = "what was saved with this state cannot be read, so that it may not be consistent: {}"


def memory_notes(arena: Arena, whole: str | None = None) -> Notes | None:
    """Return the notes of the state in memory, if it has this name; None without one. Raises as `read_extras` does."""
    for slot in (arena.current, 1 - arena.current):
        found = read_extras(arena, slot)
        if found is not None and found.tree is not None and whole in (None, found.whole):
            return Notes.from_tree(found.tree)
        if whole is None:
            return None
    return None


def notes_in(folder: Path) -> Notes | None:
    """Return the notes of the state in the arena in `folder`; None without one. Raises as `Arena.share` does."""
    arena = Arena.share(folder, run_id=folder.name)
    if arena is None:
        return None
    try:
        return memory_notes(arena)
    finally:
        arena.close()


def stored_notes(store: Store, states: Sequence[ShardState], whole: str) -> Notes:
    """Return the notes that one writer saved with the commit `whole`. states: of its lane, where they may be.

    Raises Corruption if they are damaged or gone, Unavailable, AccessDenied.
    """
    for state in states:
        there = state if state.extras_whole == whole else _at(store, state, whole)
        if there is None or there.extras is None or there.extras_whole != whole:
            continue
        saved = store.read_extras(there)
        if saved is not None and saved[0] == there.extras[0]:  # otherwise a writer has newer ones
            return Notes.from_tree(saved[1])
    if all(state.extras is None for state in states):
        return Notes()  # no session has saved it
    raise Corruption("the store no longer has its extras")


def _at(store: Store, state: ShardState, whole: str) -> ShardState | None:
    """Return a shard's state after its record of the commit `whole`; None if the log has no such record."""
    for seal in reversed(state.sealed):
        if seal.whole == whole:
            return store.state(state.shard, at=seal.seq, around=True)
    return None
