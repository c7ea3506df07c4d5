"""Find copies that are older than the newest ones: where those are damaged, or too new for a recovery."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import Corruption
from scarctl.state.layout import Layout
from scarctl.state.version import step_of
from scarctl.store.log import ShardLog
from scarctl.store.record import Record
from scarctl.store.segment import SegmentRef, ascending, positions
from scarctl.store.shard_state import ShardState
from scarctl.store.table import Tail
from scarctl.util.arrays import Ids


class _Copies(NamedTuple):
    """Copies that one record names: in its own segment, or in others."""

    ids: Ids
    version: Ids
    segment: NDArray[np.int64]
    position: Ids
    checksum: NDArray[np.uint64]
    segments: tuple[SegmentRef, ...]


def older_copies(log: ShardLog, ids: Ids, state: ShardState) -> ShardState | None:
    """Return, for `ids`, the copies next older than those in `state`; None if no partition has an older copy.

    The result has these ids only; version and segment are -1 without an older copy. It can be passed as `state` again.
    Damaged segments are skipped. Reads tails back to the oldest needed copy, as far as the log is there.
    """
    if state.layout is None:
        return None
    found = _none_of(state, ids)
    at = state.find(found.ids)
    number_of: dict[str, int] = {}  # a state may name a segment twice
    numbers_of = [number_of.setdefault(one.name, number) for number, one in enumerate(state.segments)]
    current = np.array([*numbers_of, -1])[np.where(at >= 0, state.segment[at], -1)] if len(at) else at
    wanted = current >= 0
    passed = np.zeros(len(found.ids), bool)  # the copy in `state` is newer than the record at hand
    for record, copies in _back(log, state):
        if not wanted.any():
            break
        if copies is None:
            # `verify` and the state's `damaged` name the segment; only intact copies count here.
            assert record.segment is not None, "an end has no copies"
            passed[current == number_of.get(record.segment.name, -2)] = True
            continue
        here = np.flatnonzero(wanted & np.isin(found.ids, copies.ids))
        inside = np.searchsorted(copies.ids, found.ids[here])
        numbers = np.array([number_of.get(segment.name, -1) for segment in copies.segments], np.int64)
        same = numbers[copies.segment[inside]] == current[here]
        _take(found, wanted, copies, here[passed[here] & ~same], inside[passed[here] & ~same])
        passed[here[same]] = True
    return found if found.segments else None


def state_before(log: ShardLog, state: ShardState, ids: Ids, step: int) -> ShardState:
    """Return, for partitions `ids` of `state`, the newest copies of `step` or earlier.

    The result has these ids only; version and segment are -1 without such a copy. `doubt` marks those for which a
    newer one may be in damaged records. It can be passed to `older_copies`. Reads the log back to the oldest needed
    copy. Where it has been collected, the kept consistent states are read.

    Raises Unavailable, AccessDenied.
    """
    found = _none_of(state, ids)
    if state.layout is None:
        return found
    wanted = np.ones(len(found.ids), dtype=bool)
    for record, copies in _back(log, state):
        if not wanted.any():
            break
        if copies is None:
            # Of older terms the segment may have been collected.
            if record.step <= step and record.place[:2] == (state.place or record.place)[:2]:
                found.doubt |= wanted
            continue
        here = np.flatnonzero(wanted & np.isin(found.ids, copies.ids))
        inside = np.searchsorted(copies.ids, found.ids[here])
        early = step_of(copies.version[inside]) <= step
        _take(found, wanted, copies, here[early], inside[early])
    return found


def _none_of(state: ShardState, ids: Ids) -> ShardState:
    """Return a state with these partitions, and without copies."""
    found = ShardState(state.shard, state.layout, state.place, state.epoch, state.step, state.digest)
    found.sealed, found.seal, found.line = state.sealed, state.seal, state.line
    found.past = True  # an older copy must not be replaced by the copy that it stands in for
    found.set_members(ascending(ids))
    return found


def _back(log: ShardLog, state: ShardState) -> Iterator[tuple[Record, _Copies | None]]:
    """Yield the copies of the records from that of `state` back, and of kept states; None for a damaged segment."""
    layout, last = state.layout, 0
    assert layout is not None, "a state with copies has a layout"
    places = [log.back(state.place), *(log.back(seal.place) for seal in reversed(state.sealed))]
    for number, records in enumerate(places):
        for record in records:
            if record.layout != layout.digest:
                return
            if number and last and record.seq >= last:
                break  # it was read already
            last = record.seq
            try:
                tail = log.tail(record, layout)
            except (Corruption, FileNotFoundError):
                yield record, None
            else:
                assert record.segment is not None, "an end has no content"
                own, table = _own(layout, record, record.segment, tail), tail.table
                yield record, own
                if table is not None and len(table.ids):
                    yield (
                        record,
                        _Copies(
                            table.ids,
                            table.version,
                            table.segment,
                            table.position,
                            table.checksum,
                            table.segments,
                        ),
                    )
            if number:
                break  # of a kept state only its own record is sure to be there


def _own(layout: Layout, record: Record, segment: SegmentRef, tail: Tail) -> _Copies:
    version = tail.versions
    if version is None:
        version = np.full(len(tail.ids), record.version if len(tail.ids) else 0, np.int64)
    none = np.zeros(len(tail.ids), np.int64)
    return _Copies(tail.ids, version, none, positions(layout, tail.ids), tail.checksums, (segment,))


def _take(
    found: ShardState, wanted: NDArray[np.bool_], copies: _Copies, here: NDArray[np.int64], inside: Ids
) -> None:
    """Take copies of `found.ids[here]`, which are at `inside` in `copies`."""
    if not len(here):
        return
    found.version[here] = copies.version[inside]
    found.segment[here] = (copies.segment[inside] + len(found.segments)).astype(np.int32)
    found.position[here] = copies.position[inside]
    found.checksum[here] = copies.checksum[inside]
    found.segments.extend(copies.segments)
    wanted[here] = False
