"""Read the notes that one process saved with a state: in a hand-over that waits, or in the store."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from scarctl.arena.queue import NEWEST, HandOverQueue
from scarctl.errors import Corruption
from scarctl.state.extras import Notes
from scarctl.store import ShardState, Store

UNKNOWN = "what was saved with this state cannot be read, so that it may not be consistent: {}"


def waiting_notes(queue: HandOverQueue, whole: str | None = None) -> Notes | None:
    """Return the notes in the newest moment or hand-over with extras, of the commit `whole` if given; None without one.

    Changes nothing, and skips damaged hand-overs. Raises Unavailable, AccessDenied.
    """
    for number in (NEWEST, *reversed(queue.numbers())):
        # The persister may be faster; a damaged hand-over stays for it.
        with contextlib.suppress(FileNotFoundError, Corruption):
            handover = queue.read(number)
            if handover.extras is not None and whole in (None, handover.whole):
                return Notes.from_tree(handover.extras)
    return None


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
