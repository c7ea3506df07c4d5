"""Encode and decode the frames between two daemons: a pure codec over bytes, for hostile input.

    kind uint8, 3 zero bytes, head uint32, body uint64, digest uint64 (little-endian) | head: JSON | body: bytes

`digest` is the XXH3 of head and body. It finds damage, not malice: the handshake decides who may send.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from scarctl.arena.age import Age
from scarctl.arena.line import Word
from scarctl.errors import Corruption
from scarctl.state.version import MAX_EPOCH, MAX_STEP, NEVER, pack
from scarctl.store.format import is_hex
from scarctl.util.arrays import Bytes, Ids


class Kind(IntEnum):
    """Kinds of frames, in the order in which a link sends them first."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    LAYOUT = 4
    """Begins a replica. Body: the layout's JSON."""
    BATCH = 5
    """Copies with their rows."""
    FIELDS = 6
    """What the store has of copies whose rows the replica has."""
    EXTRAS = 7
    """The file with the extras of the state that the next mark completes; empty if it has none."""
    MARK = 8
    """The replica's copies now form a state of the run, with these words."""
    ACK = 9
    REFUSED = 10
    DONE = 11
    """The run has ended, and the store has its whole state: the replica is no longer needed."""
    INVENTORY = 12
    """Asks for the age of the run's arena on the other host. The answer is of the same kind."""
    FETCH = 13
    """Asks for that arena. The answer, of the same kind, precedes its small files and its pieces."""
    FILE = 14
    """A small file of the arena that is fetched."""
    PIECE = 15
    """The next bytes of that arena's file."""
    END = 16
    """That arena is complete: the digest of all its bytes."""


PREFIX = struct.Struct("<B3xIQQ")
MAX_STRANGER = 4 << 10
"""Most bytes of a frame from a peer that has not proved its identity."""
MAX_HEAD = 64 << 10
MAX_BODY = 256 << 20
"""Most bytes of a body, except a batch's, whose limit the link sets."""

Buffer: TypeAlias = "bytes | memoryview | Bytes"


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning of a frame."""

    kind: Kind
    head: int
    body: int
    """Bytes of the body."""
    digest: int


def encode(kind: Kind, head: Mapping[str, Any], *body: Buffer) -> list[Buffer]:
    """Return the parts of a frame. Raises ValueError if its head is too long."""
    text = json.dumps(head, separators=(",", ":")).encode()
    if len(text) > MAX_HEAD:
        raise ValueError(f"a head of {len(text)} bytes")
    digest = xxhash.xxh3_64(text)
    for part in body:
        digest.update(part)
    size = sum(memoryview(part).nbytes for part in body)
    return [PREFIX.pack(kind, len(text), size, digest.intdigest()) + text, *body]


def decode_prefix(data: bytes, *, most_head: int = MAX_HEAD, most_body: int = MAX_BODY) -> Prefix:
    """Decode the beginning of a frame, `PREFIX.size` bytes. Raises Corruption, also for sizes above the limits."""
    if len(data) != PREFIX.size:
        raise Corruption("a frame ends in its prefix")
    kind, head, body, digest = PREFIX.unpack(data)
    if kind not in Kind.__members__.values() or data[1:4] != bytes(3):
        raise Corruption(f"a frame is of no known kind: {kind}")
    if head > most_head or body > most_body:
        raise Corruption(f"a frame claims {head} and {body} bytes, more than {most_head} and {most_body}")
    return Prefix(Kind(kind), head, body, digest)


def decode_head(prefix: Prefix, text: bytes, body: Buffer) -> dict[str, Any]:
    """Return the head of a complete frame. Raises Corruption if its bytes differ from those sent."""
    digest = xxhash.xxh3_64(text)
    digest.update(body)
    if digest.intdigest() != prefix.digest or len(text) != prefix.head:
        raise Corruption("a frame's checksum does not match its content")
    try:
        head = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Corruption(f"a frame's head is not JSON: {error}") from error
    if not isinstance(head, dict):
        raise Corruption("a frame's head is not an object")
    return head


# -- fields of a head ----------------------------------------------------------------------------------------------


def text_of(head: Mapping[str, Any], key: str, most: int = 1000) -> str:
    """Return a field that is a string of at most `most` characters. Raises Corruption."""
    value = head.get(key)
    if not isinstance(value, str) or len(value) > most or "\0" in value:
        raise Corruption(f"a frame's {key} is not a string")
    return value


def hex_of(head: Mapping[str, Any], key: str, digits: int) -> str:
    """Return a field that is a string of `digits` hex digits. Raises Corruption."""
    value = head.get(key)
    if not isinstance(value, str) or not is_hex(value, digits):
        raise Corruption(f"a frame's {key} is not {digits} hex digits")
    return value


def number_of(head: Mapping[str, Any], key: str, least: int, most: int) -> int:
    """Return a field that is a whole number within bounds. Raises Corruption."""
    value = head.get(key)
    if type(value) is not int or not least <= value <= most:
        raise Corruption(f"a frame's {key} is not a number from {least} to {most}")
    return value


# -- copies --------------------------------------------------------------------------------------------------------

_COPY = np.dtype(
    [(name, "<i8") for name in ("id", "moment", "version", "durable", "saved")] + [("distance", "<f8")]
)
COPY_BYTES = _COPY.itemsize


@dataclass(frozen=True, slots=True)
class Batch:
    """Fields of some copies: arrays of equal length; `data` has their rows, in the order of `arena.rows`.

    They are those of a slot, `moments` and `version`, and of the arena: see `scarctl.arena.arena`.
    """

    ids: Ids
    """Partitions, ascending."""
    moments: Ids
    version: Ids
    durable: Ids
    saved: Ids
    distance: NDArray[np.float64]
    data: Bytes

    def parts(self) -> list[Buffer]:
        """Return the body of the batch's frame, in parts."""
        table = np.empty(len(self.ids), _COPY)
        table["id"], table["moment"], table["version"] = self.ids, self.moments, self.version
        table["durable"], table["saved"], table["distance"] = self.durable, self.saved, self.distance
        return [table.view(np.uint8), self.data]


def decode_batch(head: Mapping[str, Any], body: Bytes, partitions: int) -> Batch:
    """Decode the copies in a frame's body. partitions: the layout's count. Raises Corruption if impossible."""
    count = number_of(head, "count", 1, partitions)
    at = count * COPY_BYTES
    if at > body.size:
        raise Corruption("a batch is shorter than its copies")
    table = body[:at].view(_COPY)
    ids = table["id"].astype(np.int64)
    moments, version, durable, saved = (
        table[name].copy() for name in ("moment", "version", "durable", "saved")
    )
    if ids[0] < 0 or ids[-1] >= partitions or (ids[1:] <= ids[:-1]).any():
        raise Corruption("a batch names partitions that do not exist, or one twice")
    newest = pack(MAX_EPOCH, MAX_STEP)
    bounded = all(bool(((a >= NEVER) & (a <= newest)).all()) for a in (version, durable))
    if not bounded or (moments <= 0).any() or (saved < 0).any():
        raise Corruption("a batch has impossible versions")
    return Batch(ids, moments, version, durable, saved, table["distance"].copy(), body[at:])


# -- offers --------------------------------------------------------------------------------------------------------

MAX_SIZE = 1 << 62
MAX_FILES = 1 << 20


@dataclass(frozen=True, slots=True)
class Offer:
    """An arena of a dead process, or a replica, that another host may fetch."""

    age: Age
    epoch: int
    """The arena's epoch. Its copies may all be of earlier ones."""
    size: int
    """Bytes of the arena's file that are sent; of all of it in the answer to INVENTORY."""
    line: Word | None
    """See `Arena.line`."""
    files: int = 0
    """Number of the small files that follow; 0 in the answer to INVENTORY."""
    files_size: int = 0
    """Bytes of those files."""
    withheld: int = 0
    """Number of files that are too large to be sent."""
    rate: int = 0
    """Most bytes per second that the host sends; 0: no limit."""
    gap: tuple[int, int] = (0, 0)
    """See `scarctl.arena.transfer.Gap`."""

    def frame(self, kind: Kind) -> list[Buffer]:
        """Return the frame of this offer, of kind INVENTORY or FETCH."""
        numbers = {"newest": self.age[0], "head_step": self.age[1], "steps": self.age[2], "epoch": self.epoch}
        sizes = {name: getattr(self, name) for name in ("size", "files", "files_size", "withheld", "rate")}
        gap = {"gap_at": self.gap[0], "gap": self.gap[1]}
        return encode(kind, {"found": True, **numbers, **sizes, **gap}, _pack_line(self.line))


def decode_offer(head: Mapping[str, Any], body: Bytes) -> Offer | None:
    """Decode the offer in a frame; None if the other host has nothing. Raises Corruption for impossible numbers."""
    if head.get("found") is False:
        return None
    if head.get("found") is not True or body.size % 8:
        raise Corruption("a frame does not say whether an arena was found")
    age = (
        number_of(head, "newest", 1, MAX_EPOCH),
        number_of(head, "head_step", NEVER, MAX_STEP),
        number_of(head, "steps", 0, MAX_SIZE),
    )
    return Offer(
        age,
        number_of(head, "epoch", 1, MAX_EPOCH),
        number_of(head, "size", 1, MAX_SIZE),
        _unpack_line(body.view("<i8").tolist()),
        number_of(head, "files", 0, MAX_FILES),
        number_of(head, "files_size", 0, MAX_SIZE),
        number_of(head, "withheld", 0, MAX_FILES),
        number_of(head, "rate", 0, MAX_SIZE),
        (number_of(head, "gap_at", 0, MAX_SIZE), number_of(head, "gap", 0, MAX_SIZE)),
    )


# -- marks ---------------------------------------------------------------------------------------------------------

MAX_NUMBER = 1 << 62


@dataclass(frozen=True, slots=True)
class Mark:
    """Words of an arena, as in `arena.fields`, those of its slot, and its line."""

    epoch: int
    base_epoch: int
    head_step: int
    errors: int
    sealed: int
    moment: int
    """Moment of the state that the replica's copies form now; 0 if the owner has none yet."""
    head: int
    """Its version; `NEVER` before all of its copies are sent."""
    kept: int
    """See `Fields.kept`."""
    whole: str
    """Its name; "" if the copies are of several states."""
    line: Word | None
    """See `Arena.line`."""

    @property
    def partial(self) -> bool:
        """Whether some copies are of the state before."""
        return self.moment > 0 and self.head == NEVER

    def frame(self) -> list[Buffer]:
        """Return the mark's frame."""
        head = {name: getattr(self, name) for name in (*_COUNTERS, "moment", "head", "kept", "whole")}
        return encode(Kind.MARK, head, _pack_line(self.line))


_COUNTERS = ("epoch", "base_epoch", "head_step", "errors", "sealed")


def decode_mark(head: Mapping[str, Any], body: Bytes) -> Mark:
    """Decode the mark in a frame. Raises Corruption for impossible numbers."""
    if body.size % 8:
        raise Corruption("a mark's body differs in length from its head")
    moment, whole = number_of(head, "moment", 0, MAX_NUMBER), text_of(head, "whole")
    if whole and not is_hex(whole, 32):
        raise Corruption("a mark's name of the whole state is not valid")
    return Mark(
        number_of(head, "epoch", 1, MAX_EPOCH),
        number_of(head, "base_epoch", 1, MAX_EPOCH),
        number_of(head, "head_step", NEVER, MAX_STEP),
        number_of(head, "errors", 0, MAX_NUMBER),
        number_of(head, "sealed", NEVER, pack(MAX_EPOCH, MAX_STEP)),
        moment,
        number_of(head, "head", NEVER, pack(MAX_EPOCH, MAX_STEP)),
        number_of(head, "kept", 0, moment),
        whole,
        _unpack_line(body.view("<i8").tolist()),
    )


# -- the line ------------------------------------------------------------------------------------------------------


def _pack_line(line: Word | None) -> Bytes:
    return np.array(line or (), dtype="<i8").view(np.uint8)


def _unpack_line(numbers: Sequence[int]) -> Word | None:
    """Return a line from its numbers, None for none. Raises Corruption for impossible ones."""
    if not numbers:
        return None
    if len(numbers) != len(Word._fields) or min(numbers) < 0:
        raise Corruption("a frame has an impossible line")
    return Word(*numbers)
