"""Keep the extras of each slot in a small file next to the arena.

It is a safetensors file with the moment of its slot, and a checksum of all but that. It is written in place before that
slot becomes current, so that a full folder does not stop checkpoints. Files are not synced: after a reboot they are
obsolete, like the arena.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scarctl.arena.arena import Arena
from scarctl.arena.folder import folder_error, no_links, private
from scarctl.arena.header import EXTRAS
from scarctl.errors import Corruption
from scarctl.state import codec
from scarctl.state.raw_tensor import RawTensor
from scarctl.state.version import NEVER
from scarctl.store.backends.local_files import os_error
from scarctl.store.header import Header, header_length, parse_header, place_header

log = logging.getLogger("scarctl")

LARGE = 64 << 20
"""Bytes of extras from which on a session says so: training waits while they are written."""
_EXTRAS = "scarctl/extras/"
_SPARE, _MOST_SPARE = 16 << 10, 1 << 20
"""A file's bytes are about a multiple of the first. At most the second, and a quarter, is spare."""
_DAMAGED = "the extras in this host's memory cannot be read, and are left out: %s"


@dataclass(frozen=True, slots=True)
class SlotExtras:
    """The extras of the state in one slot."""

    moment: int
    version: int
    """Version (epoch, step) of the state."""
    whole: str
    """Name of the state: see `Slot.whole`."""
    tree: Any
    """The extras; None without any."""


def write_extras(folder: Path, slot: int, moment: int, tree: Any) -> int:
    """Write the extras of slot number `slot`, which is not current, and return their bytes.

    Raises Unavailable (`kind` "arena-full"), AccessDenied.
    """
    text, tensors = codec.encode(tree)
    parts = [bytes(t.data) for t in tensors.values()]
    metadata = {"moment": str(moment), "extras": text, "digest": _digest(text, parts)}
    head = _head(
        [(_EXTRAS + n, t.dtype, t.shape) for n, t in tensors.items()], metadata, sum(map(len, parts))
    )
    return put_file(folder, slot, [head, *parts])


def _head(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str], body: int
) -> bytes:
    """Return the header of a file, with spaces at its end: the next extras, a little larger, then need no more pages.

    body: bytes of the tensors.
    """
    head = bytes(place_header(tensors, metadata)[1])
    size = len(head) + body
    spare = min(size // 4, _MOST_SPARE)
    more = (spare + -(size + spare) % _SPARE) // 8 * 8
    return (len(head) - 8 + more).to_bytes(8, "little") + head[8:] + b" " * more


def put_file(folder: Path, slot: int, parts: Sequence[bytes | memoryview]) -> int:
    """Give the file of a slot, which is not current, this content. Return its bytes. Raises as `write_extras` does."""
    path = folder / EXTRAS[slot]
    try:
        with open(path, "wb", opener=_in_place) as file:
            file.writelines(parts)
            file.truncate()
    except OSError as error:
        raise folder_error(error, path) from error
    return sum(map(len, parts))


def _in_place(path: str, flags: int) -> int:
    return private(path, flags & ~os.O_TRUNC)


def extras_file(folder: Path, slot: int) -> bytes | None:
    """Return the bytes of the file of a slot; None without one. Raises Unavailable, AccessDenied."""
    path = folder / EXTRAS[slot]
    try:
        with open(path, "rb", opener=no_links) as file:
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise os_error(error, path, "read") from error


def parse_extras(data: bytes, path: Path | str) -> tuple[int, Any]:
    """Return the moment and the extras in a file. Raises Corruption if it is not what `write_extras` wrote."""
    header = _header(data, path)
    try:
        moment, text = int(header.metadata["moment"]), header.metadata["extras"]
        digest = header.metadata["digest"]
    except (KeyError, ValueError) as error:
        raise Corruption(f"{path} has no extras: {error}") from error
    if _digest(text, [memoryview(data)[header.length :]]) != digest:
        raise Corruption(f"{path}: its checksum does not match its content")
    tensors = {
        name.removeprefix(_EXTRAS): RawTensor(e.dtype, e.shape, data[e.start : e.stop])
        for name, e in header.tensors.items()
    }
    return moment, codec.decode(text, tensors)


def read_extras(arena: Arena, slot: int | None = None) -> SlotExtras | None:
    """Return the extras of the state in a slot, by default the current one; None without a state.

    Its tree is None if the state has no extras, or they are damaged, which is logged. Raises Unavailable, AccessDenied.
    """
    found = arena.slots[arena.current if slot is None else slot]
    moment, head, whole = found.moment, found.head, found.whole
    if not moment or head == NEVER:
        return None
    path = arena.folder / EXTRAS[found.number]
    data = extras_file(arena.folder, found.number)
    tree = None
    if data is not None:
        try:
            of, tree = parse_extras(data, path)
        except Corruption as error:
            of = -1
            if found is arena.slot and found.moment == moment:  # otherwise it is being written
                log.error(_DAMAGED, error)
        tree = tree if of == moment else None
    return SlotExtras(moment, head, whole, tree)


def carry_extras(arena: Arena, moment: int) -> None:
    """Give the other slot the extras of the current one, as of `moment`. They are not decoded.

    Raises as `write_extras` does.
    """
    data = extras_file(arena.folder, arena.current) if arena.slot.moment else None
    if data is None:
        return
    try:
        header = _header(data, arena.folder / EXTRAS[arena.current])
    except Corruption as error:
        log.error(_DAMAGED, error)
        return
    if header.metadata.get("moment") == str(arena.slot.moment):
        placed = sorted(header.tensors.items(), key=lambda one: one[1].start)
        tensors = [(name, entry.dtype, entry.shape) for name, entry in placed]
        body = memoryview(data)[header.length :]
        head = _head(tensors, {**header.metadata, "moment": str(moment)}, len(body))
        put_file(arena.folder, arena.spare.number, [head, body])


def _header(data: bytes, path: Path | str) -> Header:
    length = header_length(data[:8], len(data), path)
    return parse_header(data[:length], len(data), path)


def _digest(text: str, parts: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.sha256(text.encode())
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
