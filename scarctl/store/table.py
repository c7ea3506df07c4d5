"""Encode and check the table of a full record: the newest copy of every partition (docs/FORMAT.md, section 4).

It is the end of the record's own segment. Partitions whose newest copy is in that segment are not repeated in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl.state.version import MAX_EPOCH, MAX_STEP, NEVER
from scarctl.store.format import Fields, canonical, corrupt, is_hex, parse_json
from scarctl.store.segment import SegmentRef
from scarctl.store.term import Place
from scarctl.util.arrays import Ids

KEEP_SEALED = 64
"""Most consistent states that a table names."""
TABLE_BYTES = 40
"""Bytes of a table per partition."""
FULL_RECORDS = 512
"""Most records between two full ones."""
FULL_LEAST = 16
"""Least records between two full ones that only speed up reading: reading so few is fast."""

_OTHERS, _OF_SEGMENT = 64 + KEEP_SEALED * 2, 9
"""Lists and objects of a table that are not segments; upper bound of a segment's fields."""


@dataclass(frozen=True, slots=True)
class Seal:
    """A record of a consistent state."""

    place: Place
    epoch: int
    step: int
    whole: str
    """See `Record.whole`."""

    @property
    def seq(self) -> int:
        """See `Record.seq`."""
        return self.place.seq


@dataclass(frozen=True)
class Table:
    """The part of a state that a full record's own segment does not say by itself.

    ids, version, position, checksum, segment: saved partitions whose newest copy is elsewhere, ascending. `segment` is
    an index into `segments`.
    unsaved: partitions without a saved copy, ascending. doubt: those that may have had a newer one, ascending.
    extras: version of the newest extras, and their segment; -1: the record's own.
    """

    ids: Ids
    version: NDArray[np.int64]
    position: Ids
    checksum: NDArray[np.uint64]
    segment: NDArray[np.int64]
    unsaved: Ids
    doubt: Ids
    segments: tuple[SegmentRef, ...] = ()
    extras: tuple[int, int] | None = None
    extras_whole: str = ""
    whole: str = ""
    seals: tuple[Seal, ...] = ()

    @cached_property
    def text(self) -> bytes:
        """All but the arrays, as canonical JSON, padded to a multiple of 8."""
        text = canonical(
            {
                "extras": list(self.extras) if self.extras else None,
                "extras_whole": self.extras_whole,
                "whole": self.whole,
                "seals": [[*s.place.to_json(), s.epoch, s.step, s.whole] for s in self.seals],
                "segments": [s.to_json() for s in self.segments],
            }
        )
        return text + b" " * (-len(text) % 8)

    def columns(self) -> list[NDArray[Any]]:
        """Return the arrays in the order of the file."""
        return [self.ids, self.version, self.position, self.checksum, self.segment, self.unsaved, self.doubt]


@dataclass(frozen=True, slots=True)
class Tail:
    """The per-partition arrays at a segment's end: ids int64[n] ascending, checksums uint64[n], versions int64[n].

    versions: None: all copies are of the record's version. table: of a full record.
    """

    ids: Ids
    checksums: NDArray[np.uint64]
    versions: NDArray[np.int64] | None = None
    table: Table | None = None


def parse_table(
    arrays: list[NDArray[np.int64]], text: bytes, own: Ids, partitions: int, what: object
) -> Table:
    """Return a table from the arrays and the text of a segment's end. Raises Corruption, naming `what`.

    own: partitions of the segment itself. partitions: those of the layout.
    """
    ids, version, position, checksum, segment, unsaved, doubt = arrays
    most = len(ids) + _OTHERS
    f = Fields(parse_json(text, what, containers=most, values=_OF_SEGMENT * most), what)
    listed, seals, extras = f.raw("segments"), f.raw("seals"), f.raw("extras")
    if not isinstance(listed, list) or not isinstance(seals, list) or len(seals) > KEEP_SEALED:
        raise corrupt(what, "its table is malformed")
    if extras is not None and not (
        isinstance(extras, list) and len(extras) == 2 and all(type(x) is int for x in extras)
    ):
        raise corrupt(what, "the extras of its table are malformed")
    found = Table(
        ids,
        version,
        position,
        checksum.view(np.uint64),
        segment,
        unsaved,
        doubt,
        tuple(SegmentRef.from_json(one, what) for one in listed),
        None if extras is None else (extras[0], extras[1]),
        f.hex("extras_whole", 32, empty=True),
        f.hex("whole", 32, empty=True),
        tuple(_seal(one, what) for one in seals),
    )
    if not _sound(found, own, partitions):
        raise corrupt(what, "its table contradicts itself")
    return found


def _seal(value: object, what: object) -> Seal:
    if not isinstance(value, list) or len(value) != 6:
        raise corrupt(what, "a consistent state in its table is malformed")
    epoch, step, whole = value[3:]
    if not (
        type(epoch) is int
        and 1 <= epoch <= MAX_EPOCH
        and type(step) is int
        and 0 <= step <= MAX_STEP
        and is_hex(whole, 32)
    ):
        raise corrupt(what, "a consistent state in its table is malformed")
    return Seal(Place.from_json(value[:3], what), epoch, step, whole)


def _sound(table: Table, own: Ids, partitions: int) -> bool:
    """Return whether the arrays are in range, and no partition is named twice."""
    last = len(table.segments)
    if table.extras is not None and not (table.extras[0] >= 0 and -1 <= table.extras[1] < last):
        return False
    for ids in (table.ids, table.unsaved, table.doubt):
        if len(ids) and not (ids[0] >= 0 and ids[-1] < partitions and bool((ids[1:] > ids[:-1]).all())):
            return False
    everything = np.sort(np.concatenate([own, table.ids, table.unsaved]), kind="stable")
    if bool((everything[1:] == everything[:-1]).any()) or not np.isin(table.doubt, everything).all():
        return False
    if not len(table.ids):
        return True
    return bool(
        table.version.min() > NEVER
        and table.position.min() >= 0
        and table.segment.min() >= 0
        and table.segment.max() < last
    )
