"""Lay out the arena's file, and check its header before its content is used."""

from __future__ import annotations

import mmap
import os
import stat
import struct
from pathlib import Path
from typing import Any

import numpy as np

from scarctl.errors import AccessDenied, Corruption
from scarctl.state.layout import Layout
from scarctl.state.version import MAX_EPOCH, MAX_STEP, NEVER, pack
from scarctl.store.format import MAX_LAYOUT_VALUES, parse_json
from scarctl.util.text import printable

FILE = "arena"
SLOTS = 2
EXTRAS = tuple(f"extras-{number}.safetensors" for number in range(SLOTS))
"""Names of the files next to the arena with the extras of each slot: see `scarctl.arena.extras`."""
OWNER = "owner"
"""Name of an optional file next to the arena: see `scarctl.arena.owner`."""
SITE = "site"
"""Name of the file next to an arena that says where the store's folder was."""
TOLD = "told"
"""Name of an empty file next to an arena: `scarctl status` has said that its store is gone."""
_MAGIC = b"SCARaren"
_FORMAT = 5
HEADER = 4096
_FIXED = struct.Struct("<8sIIQQQQQQ32s16s16s")
# magic, format, header, file, partitions, json at, json, arrays, tensors, layout digest, store, boot
FIELDS_AT = 256
FIELDS = (
    *("epoch", "head_step", "pid", "sealed", "errors", "base_epoch", "interval", "overhead", "failed_saves"),
    *("current", "moment", "asked", "asked_whole", "served", "kept", "encoding", "last"),
    *("hold", "hold_slot", "hold_until"),
    *(f"{name}_{slot}" for slot in range(SLOTS) for name in ("moment", "head", "whole", "whole_low")),
)
SHARED = ("durable", "saved", "wish", "distance", "encoding_error")
"""Arrays that both slots share, in the order of the file. The arrays of each slot follow, `moments` and `version`."""
_PLACE_AT = 512
_PAGE = 4096
_ALIGNED = 64
_MAX_LAYOUT_JSON = 64 << 20
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Geometry:
    """Offsets of everything in the file, from the layout alone."""

    def __init__(self, layout: Layout, layout_json: bytes, slots: int = SLOTS) -> None:
        n = 8 * layout.partitions
        self.json_at = HEADER
        self.arrays_at = _round_up(self.json_at + len(layout_json), _ALIGNED)
        self.slot_arrays_at = [self.arrays_at + (len(SHARED) + 2 * slot) * n for slot in range(slots)]
        at = _round_up(self.slot_arrays_at[-1] + 2 * n, _PAGE)
        self.tensors_at: list[int] = []
        """Offset of each slot's tensors."""
        self.tensor_at: list[list[int]] = []
        """Offset of each tensor in its slot, by group."""
        inside = 0
        for group in layout.groups:
            offsets = []
            for spec in group.tensors:
                offsets.append(inside)
                inside = _round_up(inside + spec.nbytes, _ALIGNED)
            self.tensor_at.append(offsets)
        self.slot_bytes = _round_up(inside, _PAGE)
        """Bytes of the tensors of one slot."""
        for _ in range(slots):
            self.tensors_at.append(at)
            at += self.slot_bytes
        self.size = at


def write_header(
    memory: mmap.mmap, layout: Layout, layout_json: bytes, geometry: Geometry, run_id: str, place: str
) -> None:
    text = os.fsencode(place)
    if _PLACE_AT + 2 + len(text) <= HEADER:
        memory[_PLACE_AT : _PLACE_AT + 2 + len(text)] = len(text).to_bytes(2, "little") + text
    memory[geometry.json_at : geometry.json_at + len(layout_json)] = layout_json
    fixed = _FIXED.pack(
        _MAGIC,
        _FORMAT,
        HEADER,
        geometry.size,
        layout.partitions,
        geometry.json_at,
        len(layout_json),
        geometry.arrays_at,
        geometry.tensors_at[0],
        bytes.fromhex(layout.digest),
        bytes.fromhex(run_id[:32]),
        boot_id(),
    )
    memory[: len(fixed)] = fixed


def read_header(fd: int, path: Path, run_id: str) -> tuple[Layout, Geometry]:
    """Return the layout and offsets of an existing arena. Checks every number against the layout."""
    status = os.fstat(fd)
    if (
        not stat.S_ISREG(status.st_mode)
        or status.st_uid != os.getuid()
        or stat.S_IMODE(status.st_mode) & 0o077
        or status.st_nlink > 1  # under a second name it may be a file of another kind
    ):
        raise AccessDenied(
            f"{path} is not a private file of this user", hint="another user may have created it: remove it"
        )
    head = os.pread(fd, _FIXED.size, 0)
    if len(head) < _FIXED.size:
        raise not_an_arena(path, "it is too short")
    fields: tuple[Any, ...] = _FIXED.unpack(head)
    magic, version, header, size, partitions, json_at, json_size, arrays_at, tensors_at, *ids = fields
    digest, store, boot = ids
    if magic != _MAGIC or header != HEADER or json_at != HEADER:
        raise not_an_arena(path, "its header is not valid")
    if version != _FORMAT:
        raise not_an_arena(path, f"it has format {version}, this scarctl reads {_FORMAT}")
    if store.hex() != run_id[:32]:
        raise not_an_arena(path, "it belongs to another store")
    if size != status.st_size or json_size > _MAX_LAYOUT_JSON or json_at + json_size > size:
        raise not_an_arena(path, "its size differs from its header")
    layout_json = os.pread(fd, json_size, json_at)
    try:
        layout = Layout.from_json(parse_json(layout_json, path, values=MAX_LAYOUT_VALUES))
    except Corruption as error:
        raise not_an_arena(path, f"its layout cannot be read: {error}") from error
    geometry = Geometry(layout, layout_json)
    mine = (geometry.size, layout.partitions, geometry.arrays_at, geometry.tensors_at[0], layout.digest)
    if mine != (size, partitions, arrays_at, tensors_at, digest.hex()):
        raise not_an_arena(path, "its header does not fit its layout")
    if not _possible(os.pread(fd, 8 * len(FIELDS), FIELDS_AT)):
        raise not_an_arena(path, "its counters are impossible")
    if boot != boot_id():
        raise BeforeBoot(f"{path} is from before this machine's last boot", hint="it cannot be used")
    return layout, geometry


def read_place(fd: int) -> str:
    """Return the address of the arena's store, for display; "" if the header has none."""
    raw = os.pread(fd, HEADER - _PLACE_AT, _PLACE_AT)
    return printable(os.fsdecode(raw[2 : 2 + int.from_bytes(raw[:2], "little")]))


def _possible(fields: bytes) -> bool:
    """Return whether a run can have written the numbers after the header."""
    found = dict(zip(FIELDS, np.frombuffer(fields, np.int64).tolist(), strict=True))
    newest = pack(MAX_EPOCH, MAX_STEP)
    return (
        all(0 <= found[name] <= MAX_EPOCH for name in ("epoch", "base_epoch"))
        and NEVER <= found["head_step"] <= MAX_STEP
        and 0 <= found["pid"] < 1 << 31
        and all(NEVER <= found[name] <= newest for name in ("sealed", "head_0", "head_1"))
        and all(found[name] in range(SLOTS) for name in ("current", "hold_slot"))
        and all(0 <= found[name] <= found["moment"] for name in ("moment_0", "moment_1", "kept"))
        and found["asked"] >= found["served"] >= 0
        and found["asked_whole"] >= 0  # it is written before `asked`
        and found["errors"] >= 0
    )


class BeforeBoot(Corruption):
    """The arena is from before the machine's last boot: its words do not show which copies are complete."""


def inode_in(folder: Path) -> int:
    """Return the inode of the arena's file in a folder; 0 without one."""
    try:
        return os.stat(folder / FILE).st_ino
    except FileNotFoundError:
        return 0


def naturalize(fd: int) -> None:
    """Mark an arena's file, which arrived complete from another host, as of this boot, and of no process here."""
    os.pwrite(fd, boot_id(), _FIXED.size - 16)
    for name in ("pid", "hold"):
        os.pwrite(fd, bytes(8), FIELDS_AT + 8 * FIELDS.index(name))


def boot_id() -> bytes:
    """Return the id of this boot: 16 bytes; zeros if the system has none."""
    try:
        return bytes.fromhex(_BOOT_ID.read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)


def not_an_arena(path: Path, reason: str) -> Corruption:
    return Corruption(
        f"{path} is not an arena of this run: {reason}",
        hint="the store is not affected; remove that file to continue without it",
    )


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
