"""Choose the copies to move so that mostly dead segments can be deleted (docs/FORMAT.md, section 9).

Copies that will soon be replaced anyway are not worth moving. So the score of a segment is its dead bytes per moved
byte, times the expected life of the moved copies. The life of a copy is estimated from that of the copy before it.
Moved copies are sorted by it, so that new segments die as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scarctl.state.layout import Layout
from scarctl.state.version import step_of
from scarctl.store.segment import ascending, by_group, full_piece
from scarctl.store.shard_state import ShardState
from scarctl.store.store import Store
from scarctl.util.arrays import Bytes, Ids

LONG = 64.0
"""Longest estimated life of a copy, in commits: longer estimates would be unreliable."""
_HASTE = 4.0  # shortest life of a copy that is estimated, in commits
PARTS = 4
SMALLEST = 64 << 10
"""PARTS: most segments that one turn writes. SMALLEST: bytes that each of them should have at least."""


class Lives:
    """Lives of copies, in steps, measured in the commits of this writer."""

    def __init__(self) -> None:
        self.between = np.empty(0, np.int64)
        """Steps between the last two copies of each member; -1: unknown."""
        self.pace = 1.0
        """Steps between two commits."""
        self._last = -1

    def saved(self, state: ShardState, at: NDArray[np.int64], step: int) -> None:
        """Note that members `at` are about to be saved as of `step`. `state`: the state before that."""
        if len(self.between) != len(state.ids):
            self.between = np.full(len(state.ids), -1, np.int64)
        before = step_of(state.version[at])
        self.between[at] = np.where((before >= 0) & (before < step), step - before, -1)
        if 0 <= self._last < step:
            self.pace += (step - self._last - self.pace) / 8
        self._last = step

    def left(self, state: ShardState, at: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the expected commits until each of the members `at` has a newer copy."""
        now = max(self._last, state.step)
        age = np.maximum(now - step_of(state.version[at]), 0)
        known = self.between[at] if len(self.between) == len(state.ids) else np.full(len(at), -1)
        life = np.where(known >= 0, known, 2 * age)
        left: NDArray[np.float64] = np.maximum(life - age, 0) / max(self.pace, 1.0)
        return np.minimum(left, LONG) + _HASTE


@dataclass
class Ledger:
    """The counts of one writer since the store was opened."""

    handed_bytes: int = 0
    """Bytes of partitions in all commits."""
    written_bytes: int = 0
    """Bytes of all files written: segments and records."""
    lives: Lives = field(default_factory=Lives)


@dataclass(frozen=True, slots=True)
class Space:
    """Divide the bytes of one shard's files by their use."""

    total: int
    """Bytes of all files."""
    live: int
    """Bytes of newest copies."""
    pinned: int
    """Bytes of other copies in segments of kept sealed states, which cannot be reclaimed."""
    dead: int
    """Bytes of segments without a newest copy that no kept state needs: they can be deleted."""


def live_bytes(state: ShardState) -> NDArray[np.int64]:
    """Return the bytes of newest copies in each of the state's segments."""
    at = np.flatnonzero(state.segment >= 0)
    weights = state.bytes_of(at).astype(np.float64)
    return np.bincount(state.segment[at], weights, len(state.segments)).astype(np.int64)


def choose(state: ShardState, lives: Lives, kept: frozenset[str], *, free: int, limit: int) -> Ids:
    """Return the members (indices of the arrays) to move, to delete segments with about `free` dead bytes.

    At most about `limit` bytes are moved. Segments in `kept`, and the one with the newest extras, stay.
    """
    used = live_bytes(state)
    length = np.array([s.data for s in state.segments], np.int64)
    at = np.flatnonzero(state.segment >= 0)
    left = np.bincount(state.segment[at], lives.left(state, at), len(used))
    count = np.bincount(state.segment[at], minlength=len(used))
    worth = np.where(used > 0, (length - used) / np.maximum(used, 1) * left / np.maximum(count, 1), 0.0)
    for number, segment in enumerate(state.segments):
        if segment.name in kept or (state.extras is not None and state.extras[1] == number):
            worth[number] = 0.0
    chosen = np.zeros(len(used), bool)
    moved = 0
    for number in np.argsort(-worth, kind="stable").tolist():
        if free <= 0 or worth[number] <= 0 or moved >= limit:
            break
        # A segment is left alone if moving would write much more than it frees.
        if used[number] > 4 * (length[number] - used[number]):
            continue
        chosen[number] = True
        moved += int(used[number])
        free -= int(length[number] - used[number])
    mine = at[chosen[state.segment[at]]]
    if moved <= limit:
        return mine
    # Only a part of the last segment is moved. The rest follows in the next turn.
    order = mine[np.argsort(-worth[state.segment[mine]], kind="stable")]
    until = np.searchsorted(np.cumsum(state.bytes_of(order)), limit) + 1
    return np.sort(order[:until])


def parts(state: ShardState, lives: Lives, at: Ids) -> list[Ids]:
    """Split the members `at` into new segments: copies of one encoding, with about the same expected life."""
    encodings = state.encoding(at)
    if (kinds := np.unique(encodings)).size > 1:
        return [ids for kind in kinds for ids in parts(state, lives, at[encodings == kind])]
    nbytes = int(state.bytes_of(at).sum())
    count = int(np.clip(nbytes // SMALLEST, 1, min(PARTS, len(at))))
    order = at[np.argsort(lives.left(state, at), kind="stable")]
    cut = np.cumsum(state.bytes_of(order)) * count // (nbytes + 1)
    return [state.ids[np.sort(order[cut == n])] for n in range(count) if (cut == n).any()]


def read_pieces(
    store: Store, state: ShardState, layout: Layout, ids: Ids
) -> tuple[Ids, dict[tuple[int, int], Bytes], list[str]]:
    """Return the intact copies of `ids` (ascending), as pieces of a new segment, and the faults of the others.

    layout: that of the stored copies, which have one encoding.
    """
    bad: list[tuple[Ids, str]] = []
    found: dict[int, list[tuple[Ids, list[Bytes]]]] = {}
    for batch in store.read(state, ids, corrupt=bad, as_stored=True):
        found.setdefault(batch.group, []).append((batch.ids, batch.tensors))
    if bad:
        ids = np.setdiff1d(ids, np.concatenate([wrong for wrong, _ in bad]))
    pieces: dict[tuple[int, int], Bytes] = {}
    for g, i, j in by_group(layout, ascending(ids)):
        group = layout.groups[g]
        starts, stops = layout.row_ranges(ids[i:j])
        for t, spec in enumerate(group.tensors):
            piece = full_piece(group, t)
            out = np.empty(int((stops - starts).sum()) * spec.row_bytes, np.uint8)
            whole = out[: out.size - out.size % piece].reshape(-1, piece) if piece else out.reshape(0, 0)
            for batch_ids, tensors in found[g]:
                place = np.searchsorted(ids[i:j], batch_ids)
                data = tensors[t].reshape(-1)
                if not piece:
                    continue
                full = data.size // piece
                whole[place[:full]] = data[: full * piece].reshape(full, piece)
                if full < len(place):
                    out[out.size - out.size % piece :] = data[full * piece :]
            pieces[g, t] = out
    return ids, pieces, [reason for _, reason in bad]
