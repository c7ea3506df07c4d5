"""Find a shard's newest copies that are not later than a step, for a recovery that must not take later ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import Corruption
from scarctl.state.version import NEVER, step_of
from scarctl.store.log import ShardLog
from scarctl.store.record import Record
from scarctl.store.segment import SegmentRef, Tail, ascending, positions
from scarctl.store.shard_state import ShardState
from scarctl.util.arrays import Ids


def state_before(log: ShardLog, state: ShardState, ids: Ids, step: int) -> ShardState:
    """Return, for members `ids` of `state`, the newest copies of `step` or earlier.

    The result has these ids only; version and segment are -1 without such a copy. `doubt` marks those for which a
    newer one may be in damaged records. It can be passed to `ShardLog.older`. Reads the log back to the oldest needed
    copy. Where it has been collected, the kept sealed states are read.

    Raises Unavailable, AccessDenied.
    """
    head = state.layout, state.seq, state.epoch, state.step, state.tail_digest, state.records
    found = ShardState(log.shard, *head, sealed=state.sealed, boundary=state.boundary)
    found.past = True
    found.set_members(ascending(ids))
    if state.layout is None:
        return found
    wanted, sealed = np.ones(len(found.ids), dtype=bool), NEVER
    for record in log.back(state.seq):
        if not wanted.any() or record.layout != state.layout.digest:
            break
        if record.kind == "epoch":
            continue
        try:
            tail = None if record.segment is None else log.tail(record, state.layout)
        except (Corruption, FileNotFoundError):
            # Below the boundary the segment may have been collected.
            if record.step <= step and record.seq >= state.boundary:
                found.doubt |= wanted
            sealed = NEVER  # what it held may be newer than the copies below it
            continue
        if record.sealed and record.step <= step and sealed < 0:
            sealed = record.version
        if tail is not None and record.segment is not None:
            _take(found, wanted, record, record.segment, tail, step, sealed)
    if wanted.any():
        _from_kept(log, found, wanted, step)
    return found


def _take(
    found: ShardState,
    wanted: NDArray[np.bool_],
    record: Record,
    segment: SegmentRef,
    tail: Tail,
    step: int,
    sealed: int,
) -> None:
    """Take the copies of one record that are wanted, and not later than `step`.

    sealed: version of the newest seal after the record that is not later, `NEVER` without one: it has found all of them
    unchanged.
    """
    assert found.layout is not None
    assert tail.checksums is not None
    here = np.flatnonzero(wanted & np.isin(found.ids, tail.ids))
    inside = np.searchsorted(tail.ids, found.ids[here])
    own = np.full(len(here), record.version) if tail.versions is None else tail.versions[inside]
    if sealed >= 0:
        own = np.full(len(here), sealed)
    early = step_of(own) <= step
    here, inside = here[early], inside[early]
    if not len(here):
        return
    found.version[here] = own[early]
    found.segment[here] = len(found.segments)
    found.position[here] = positions(found.layout, tail.ids)[inside]
    found.checksum[here] = tail.checksums[inside]
    found.segments.append(segment)
    wanted[here] = False


def _from_kept(log: ShardLog, found: ShardState, wanted: NDArray[np.bool_], step: int) -> None:
    """Take what is left from kept sealed states."""
    for seal in reversed(found.sealed):
        if not wanted.any():
            return
        if seal.step > step:
            continue
        try:
            kept = log.state(seal.seq)
        except Corruption:
            continue  # collected, or damaged
        at = np.flatnonzero(wanted)
        there = kept.find(found.ids[at])
        good = (there >= 0) & (kept.version[there] >= 0) & (step_of(kept.version[there]) <= step)
        at, there = at[good], there[good]
        found.segment[at] = kept.segment[there] + np.int32(len(found.segments))
        for name in ("version", "position", "checksum"):
            getattr(found, name)[at] = getattr(kept, name)[there]
        found.segments = [*found.segments, *kept.segments]
        wanted[at] = False
