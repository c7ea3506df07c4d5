"""Encode and check records: small JSON files whose exclusive creation is the commit (docs/FORMAT.md, section 3)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from scarctl.errors import Corruption, UsageError
from scarctl.state.version import MAX_EPOCH, MAX_STEP, pack
from scarctl.store.format import FORMAT, MAX_RECORDS, MAX_SHARD, Fields, corrupt, is_hex, load_json, sign_json
from scarctl.store.segment import SegmentRef
from scarctl.store.term import NO_LINE, Line, Place, now, who

FULL, DELTA, END = "full", "delta", "end"
_PUT_BACK = (
    "put this file back from a copy of this store; without it nothing more can be saved here, but `scarctl recover` "
    "and `scarctl export` read around it"
)


@dataclass(frozen=True)
class Record:
    """One record of a lane. `partitions`: number of saved partitions. `nbytes`: bytes of their data."""

    shard: int
    place: Place
    kind: str
    """"full": its segment has the whole table. "delta": what has changed since the record before. "end": closes the
    log, and names the term that closed it."""
    parent: str = ""
    """Digest of the record before it in its term; "" for the first."""
    epoch: int = 0
    """Number of the term with which its writer was opened, or rolled back. A writer that opens again only to collect
    keeps it."""
    step: int = 0
    layout: str = ""
    segment: SegmentRef | None = None
    mixed: bool = False
    """Whether its copies are of several steps, which its segment lists."""
    partitions: int = 0
    full: int = 0
    """Number of the newest full record of its term: its own, if it is one."""
    rest: int = 0
    """Saved partitions of a full record's table whose copies are in other segments."""
    unsaved: int = 0
    """Partitions of a full record's table that were never saved."""
    doubt: int = 0
    """Partitions of a full record's table that may have had a newer copy in a damaged segment."""
    extras: bool = False
    whole: str = ""
    """Name of the commit of the whole state that a consistent record belongs to: 32 hex digits, which only the records
    of that commit have, in all lanes. "": the state is not consistent."""
    seal: Place | None = None
    """The newest consistent state: this record itself, or an earlier full one."""
    line: Line = NO_LINE
    base: Place | None = None
    """Of the first record of a term: the record whose state it begins with; None: an empty state. After a roll-back it
    is the record of the kept state."""
    closer: tuple[int, str] | None = None
    """Of an end: number and id of the term that closed the log."""
    created: str = field(default_factory=now)
    writer: str = field(default_factory=who)

    def __post_init__(self) -> None:
        if self.whole and not is_hex(self.whole, 32):
            raise UsageError(f"{self.whole!r:.40} cannot be the name of a commit of the whole state")

    @property
    def seq(self) -> int:
        """Its number among all records of the lane: see `Place.seq`."""
        return self.place.seq

    @property
    def k(self) -> int:
        """Its number in its term."""
        return self.place.k

    @property
    def sealed(self) -> bool:
        """Whether all of its state's copies are of its step."""
        return bool(self.whole)

    @property
    def ends(self) -> bool:
        """Whether it closes its term's log."""
        return self.kind == END

    @property
    def first(self) -> bool:
        """Whether it is the first of its term: its writer began."""
        return self.place.k == 1

    @property
    def changes(self) -> bool:
        """Whether it has changed the state. Others have only moved copies, or repeated the table."""
        return self.line == Line(self.place.id, self.place.k)

    @property
    def commits(self) -> bool:
        """Whether it has saved copies or extras."""
        return self.changes and not self.first

    @property
    def nbytes(self) -> int:
        return self.segment.data if self.segment else 0

    @property
    def encoded(self) -> bool:
        """Whether the record's copies are encoded."""
        return self.segment is not None and self.segment.encoding != "exact"

    @property
    def version(self) -> int:
        """Version of the copies in this commit."""
        return pack(self.epoch, self.step)

    @cached_property
    def data(self) -> bytes:
        """The file's content."""
        return self._signed[0]

    @cached_property
    def digest(self) -> str:
        """The file's checksum, which the next record has as its parent."""
        return self._signed[1]

    @cached_property
    def _signed(self) -> tuple[bytes, str]:
        return sign_json(self.to_json())

    def to_json(self) -> dict[str, Any]:
        head = {"format": FORMAT, "kind": self.kind, "lane": self.shard, "place": self.place.to_json()}
        tail = {"created": self.created, "writer": self.writer}
        if self.closer is not None:
            return {**head, "closer": list(self.closer), **tail}
        return {
            **head,
            "parent": self.parent,
            "epoch": self.epoch,
            "step": self.step,
            "layout": self.layout,
            "segment": self.segment.to_json() if self.segment else None,
            "mixed": self.mixed,
            "partitions": self.partitions,
            "full": self.full,
            "rest": self.rest,
            "unsaved": self.unsaved,
            "doubt": self.doubt,
            "extras": self.extras,
            "whole": self.whole,
            "seal": self.seal.to_json() if self.seal else None,
            "line": list(self.line),
            "base": self.base.to_json() if self.base else None,
            **tail,
        }

    @staticmethod
    def parse(data: bytes, what: object, *, shard: int, place: Place) -> Record:
        """Parse a record from its file's bytes, and check every field. Raises Corruption, naming `what`."""
        try:
            record = Record._parsed(data, what, shard, place)
        except Corruption as error:
            if error.kind != Corruption.kind:
                raise  # of a later version
            raise Corruption(error.message, hint=_PUT_BACK) from error
        return record

    @staticmethod
    def _parsed(data: bytes, what: object, shard: int, place: Place) -> Record:
        f = Fields(load_json(data, what), what)
        kind = f.text("kind")
        if f.integer("lane", 0, MAX_SHARD) != shard or Place.from_json(f.raw("place"), what) != place:
            raise corrupt(
                what, "it is the record of another place: its lane or number is not that of its path"
            )
        if kind == END:
            record = Record(shard, place, END, closer=_closer(f.raw("closer"), place, what))
        elif kind in (FULL, DELTA):
            record = _commit(f, what, shard, place, kind)
        else:
            raise corrupt(what, f"{kind!r:.40} is not a kind of record")
        # A later version of scarctl may add fields, so digest and bytes are taken from the file.
        named = {"created": f.text("created"), "writer": f.text("writer")}
        record.__dict__.update(digest=f.text("checksum"), data=data, **named)
        return record


def _commit(f: Fields, what: object, shard: int, place: Place, kind: str) -> Record:
    full, k = kind == FULL, place.k
    segment = None if f.raw("segment") is None else SegmentRef.from_json(f.raw("segment"), what)
    seal = None if f.raw("seal") is None else Place.from_json(f.raw("seal"), what)
    base = None if f.raw("base") is None else Place.from_json(f.raw("base"), what)
    whole, own = f.hex("whole", 32, empty=True), seal == place
    record = Record(
        shard=shard,
        place=place,
        kind=kind,
        parent=f.hex("parent", 64, empty=k == 1),
        epoch=f.integer("epoch", 1, min(place.number, MAX_EPOCH)),
        step=f.integer("step", -1 if full else 0, MAX_STEP),
        layout=f.hex("layout", 64),
        segment=segment,
        mixed=f.flag("mixed"),
        partitions=f.integer("partitions"),
        full=f.integer("full", k if full else 1, k if full else k - 1),
        rest=f.integer("rest"),
        unsaved=f.integer("unsaved"),
        doubt=f.integer("doubt"),
        extras=f.flag("extras"),
        whole=whole,
        seal=seal,
        line=_line(f.raw("line"), what),
        base=base,
    )
    if segment is None:
        raise corrupt(what, "it names no segment")
    if not full and (record.rest or record.unsaved or record.doubt):
        raise corrupt(what, "only a full record has a table")
    if bool(whole) != own or (own and not full) or (seal is not None and seal.seq > place.seq):
        raise corrupt(what, "it does not say which state is consistent")
    if (base is not None and (k > 1 or base.number >= place.number)) or (k == 1) != (record.parent == ""):
        raise corrupt(what, "only the first record of a term builds on another term")
    if whole and (record.encoded or record.unsaved or record.doubt):
        raise corrupt(what, "it calls a state consistent that is not")
    return record


def _line(value: object, what: object) -> Line:
    if not (isinstance(value, list) and len(value) == 2 and type(value[1]) is int and is_hex(value[0], 32)):
        raise corrupt(what, "its line is malformed")
    if not 1 <= value[1] <= MAX_RECORDS:
        raise corrupt(what, "its line is malformed")
    return Line(*value)


def _closer(value: object, place: Place, what: object) -> tuple[int, str]:
    if not (isinstance(value, list) and len(value) == 2 and type(value[0]) is int and is_hex(value[1], 32)):
        raise corrupt(what, "it does not say who closed the log")
    if not place.number < value[0] <= MAX_EPOCH:
        raise corrupt(what, "a log is closed by a later term")
    return value[0], value[1]
