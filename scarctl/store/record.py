"""Encode and check commit records: small JSON files whose creation is the commit (docs/FORMAT.md, section 3)."""

from __future__ import annotations

import datetime
import os
import socket
import uuid
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from scarctl.errors import Corruption, UsageError
from scarctl.state.version import MAX_EPOCH, MAX_STEP, pack
from scarctl.store.format import (
    ENCODED_FORMAT,
    FORMAT,
    MAX_SEQ,
    MAX_SHARD,
    MIXED_FORMAT,
    Fields,
    corrupt,
    is_hex,
    load_json,
    sign_json,
)
from scarctl.store.segment import SegmentRef

KINDS = ("commit", "epoch", "compact")

_PUT_BACK = (
    "put this file back from a copy of this store; without it nothing more can be saved here, but `scarctl recover` "
    "and `scarctl export` read around it"
)


def now() -> str:
    """Return the UTC time to the second, for display only."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def who() -> str:
    """Return this process as `host:pid`, for display."""
    return f"{socket.gethostname()}:{os.getpid()}"


def alone(shard: int, seq: int) -> str:
    """Return a unique identity for a sealed record that has no name."""
    return f"{shard:08x}{seq:024x}"


@dataclass(frozen=True)
class Record:
    """One record of a shard's log. `partitions`: number of saved partitions. `nbytes`: bytes of their data."""

    seq: int
    shard: int
    kind: str
    epoch: int
    step: int
    parent: str
    layout: str
    sealed: bool = False
    whole: str = ""
    """Name of the commit of the whole state that a sealed record belongs to: 32 hex digits, which only the records of
    that commit have, in all shards. "": no commit of several shards."""
    segment: SegmentRef | None = None
    mixed: bool = False
    """Whether the commit has copies of several steps, which its segment lists."""
    partitions: int = 0
    extras: bool = False
    base: int | None = None
    boundary: int = 0
    line: str = ""
    """See `scarctl.store.line`. A new record without a line begins one. An old record's line may be unknown."""
    write_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: str = field(default_factory=now)
    writer: str = field(default_factory=who)

    def __post_init__(self) -> None:
        if not self.line:
            object.__setattr__(self, "line", self.write_id)
        if self.whole and not (self.sealed and is_hex(self.whole, 32)):
            raise UsageError(f"{self.whole!r:.40} cannot be the name of a commit of the whole state")

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

    @property
    def identity(self) -> str:
        """The name `whole`. A sealed record of an earlier format has its own name, for its shard alone."""
        return self.whole or alone(self.shard, self.seq)

    @property
    def segment_kind(self) -> str:
        """Kind of the segment that a record of this kind names."""
        return "members" if self.kind == "epoch" else "mixed" if self.mixed else self.kind

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
        return {
            "format": ENCODED_FORMAT if self.encoded else MIXED_FORMAT if self.mixed else FORMAT,
            **({"mixed": True} if self.mixed else {}),
            "kind": self.kind,
            "seq": self.seq,
            "shard": self.shard,
            "epoch": self.epoch,
            "step": self.step,
            "write_id": self.write_id,
            "parent": self.parent,
            "sealed": self.sealed,
            "whole": self.whole,
            "layout": self.layout,
            "segment": self.segment.to_json() if self.segment else None,
            "partitions": self.partitions,
            "extras": self.extras,
            "base": self.base,
            "boundary": self.boundary,
            "line": self.line,
            "created": self.created,
            "writer": self.writer,
        }

    @staticmethod
    def parse(data: bytes, what: object, *, shard: int, seq: int) -> Record:
        """Parse a record from its file's bytes, and check every field. Raises Corruption, naming `what`."""
        try:
            return Record._parsed(data, what, shard, seq)
        except Corruption as error:
            if error.kind != Corruption.kind:
                raise  # of a later version
            raise Corruption(error.message, hint=_PUT_BACK) from error

    @staticmethod
    def _parsed(data: bytes, what: object, shard: int, seq: int) -> Record:
        obj = load_json(data, what)
        f = Fields(obj, what)
        kind = f.text("kind")
        if kind not in KINDS:
            raise corrupt(what, f"{kind!r:.40} is not a kind of record")
        if f.integer("seq", 0, MAX_SEQ) != seq or f.integer("shard", 0, MAX_SHARD) != shard:
            raise corrupt(
                what, "it is the record of another place: its shard or number is not that of its path"
            )
        epoch_record = kind == "epoch"
        segment = None if f.raw("segment") is None else SegmentRef.from_json(f.raw("segment"), what)
        partitions = f.integer("partitions")
        if segment is None and (partitions or f.flag("extras")):
            raise corrupt(what, "it has partitions or extras, but no segment")
        base = f.optional("base", 0, max(seq - 1, 0))
        if base is not None and not (epoch_record and seq):
            raise corrupt(what, "only an epoch record may have a base")
        sealed, whole = f.flag("sealed"), "" if f.raw("whole") is None else f.hex("whole", 32, empty=True)
        if whole and not sealed:
            raise corrupt(what, "it is not sealed, but names a whole state")
        mixed = "mixed" in obj and f.flag("mixed")
        number = f.integer("format")
        if mixed and (kind != "commit" or segment is None or number < MIXED_FORMAT):
            raise corrupt(what, f"only a commit of format {MIXED_FORMAT} may have copies of several steps")
        encoded = segment is not None and segment.encoding != "exact"
        if encoded and (epoch_record or sealed or number < ENCODED_FORMAT):
            raise corrupt(what, f"only a record of format {ENCODED_FORMAT} that seals nothing may be encoded")
        record = Record(
            seq=seq,
            shard=shard,
            kind=kind,
            mixed=mixed,
            epoch=f.integer("epoch", 1, MAX_EPOCH),
            step=f.integer("step", -1 if epoch_record else 0, MAX_STEP),
            parent=f.hex("parent", 64, empty=seq == 0),
            layout=f.hex("layout", 64),
            sealed=sealed,
            whole=whole,
            segment=segment,
            partitions=partitions,
            extras=f.flag("extras"),
            base=base,
            boundary=f.integer("boundary", 0, seq),
            write_id=f.hex("write_id", 32),
            created=f.text("created"),
            writer=f.text("writer"),
        )
        # A later version of scarctl may add fields, so digest and bytes are taken from the file.
        record.__dict__.update(digest=f.text("checksum"), data=data, line=_line(obj, f, record))
        return record


def _line(obj: dict[str, Any], f: Fields, record: Record) -> str:
    """Return the line of a record. If an earlier version wrote it, only a record that begins a line has one."""
    if "line" in obj:
        return f.hex("line", 32)
    begins = record.kind == "commit" or record.base is not None or record.seq == 0
    return record.write_id if begins else ""
