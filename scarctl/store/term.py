"""Name a writer's terms, and the places of their records in files (docs/FORMAT.md, section 6).

A writer claims a term by creating `terms/<number>.json` exclusively, with a random id. Its records are in a folder of
this number and id, so that no two writers share a name.
"""

from __future__ import annotations

import datetime
import os
import socket
import uuid
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from scarctl.errors import UsageError
from scarctl.state.version import MAX_EPOCH
from scarctl.store.format import (
    FORMAT,
    MAX_RECORDS,
    MAX_SHARD,
    MAX_TERM,
    Fields,
    corrupt,
    dump_json,
    is_hex,
    load_json,
    log_folder,
    record_path,
    term_path,
)

_SEQ_BITS = 40
"""Bits of a record's number within its term, in `Place.seq`."""
_ID_DIGITS = 15
"""Hexadecimal digits of a term's id that are kept in memory: 60 bits."""


def now() -> str:
    """Return the UTC time to the second, for display only."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def who() -> str:
    """Return this process as `host:pid`, for display."""
    return f"{socket.gethostname()}:{os.getpid()}"


class Place(NamedTuple):
    """Where a record is: its lane's term, by number and id, and its own number in that term, from 1."""

    number: int
    id: str
    k: int

    @property
    def seq(self) -> int:
        """One number for the records of a lane, in their order."""
        return self.number << _SEQ_BITS | self.k

    @property
    def identity(self) -> str:
        """A name that no other record has, in any store: 32 hex digits."""
        return f"{self.id[:22]}{self.k:010x}"

    def path(self, shard: int) -> str:
        return record_path(shard, self.number, self.id, self.k)

    def to_json(self) -> list[Any]:
        return [self.number, self.id, self.k]

    @staticmethod
    def from_json(value: object, what: object) -> Place:
        """Return a place from its JSON. Raises Corruption, naming `what`."""
        if not (
            isinstance(value, list)
            and len(value) == 3
            and type(value[0]) is int
            and 1 <= value[0] <= MAX_EPOCH
            and is_hex(value[1], 32)
            and type(value[2]) is int
            and 1 <= value[2] <= MAX_RECORDS
        ):
            raise corrupt(what, "the place of a record is malformed")
        return Place(*value)


def split_seq(seq: int) -> tuple[int, int]:
    """Return the number of a record's term, and its own number there, from `Place.seq`."""
    return seq >> _SEQ_BITS, seq & MAX_RECORDS


def shown(seq: int) -> str:
    """Return a record's number for display: "3-17" is record 17 of term 3."""
    number, k = split_seq(seq)
    return f"{number}-{k}"


class Line(NamedTuple):
    """The newest record that changed the state of a lane: the id of its term, and its number there.

    Records that change nothing pass it on. So the newest record alone says on which history it builds. A copy of a
    store has another line once something is saved to either. ("", 0) before the first record.
    """

    id: str = ""
    k: int = 0

    @property
    def number(self) -> int:
        """The id as a number, 1 .. 2^60; 0 for none."""
        return number_of(self.id)


NO_LINE = Line()


def number_of(term: str) -> int:
    """Return the id of a term as a number, 1 .. 2^60, for memory that notes it; 0 for ""."""
    return int(term[:_ID_DIGITS], 16) + 1 if term else 0


@dataclass(frozen=True)
class Term:
    """The claim of a term: the file `terms/<number>.json`."""

    shard: int
    number: int
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: str = field(default_factory=now)
    writer: str = field(default_factory=who)

    def __post_init__(self) -> None:
        if self.number > MAX_EPOCH:
            raise UsageError(f"lane {self.shard}: its terms are used up", hint="use another folder")

    @property
    def path(self) -> str:
        return term_path(self.shard, self.number)

    @property
    def folder(self) -> str:
        """The folder of its records."""
        return log_folder(self.shard, self.number, self.id)

    def place(self, k: int) -> Place:
        return Place(self.number, self.id, k)

    @cached_property
    def data(self) -> bytes:
        """The file's content."""
        return dump_json(
            {
                "format": FORMAT,
                "kind": "term",
                "lane": self.shard,
                "number": self.number,
                "id": self.id,
                "created": self.created,
                "writer": self.writer,
            }
        )

    @staticmethod
    def parse(data: bytes, what: object, *, shard: int, number: int) -> Term:
        """Parse a claim from its file's bytes, and check every field. Raises Corruption, naming `what`."""
        if len(data) > MAX_TERM:
            raise corrupt(what, "it is too long for the claim of a term")
        f = Fields(load_json(data, what), what)
        if f.text("kind") != "term" or f.integer("lane", 0, MAX_SHARD) != shard:
            raise corrupt(what, "it is not the claim of a term of this lane")
        if f.integer("number", 1, MAX_EPOCH) != number:
            raise corrupt(what, "it is the claim of another term")
        term = Term(shard, number, f.hex("id", 32), f.text("created"), f.text("writer"))
        term.__dict__["data"] = data  # a later version of scarctl may add fields
        return term
