"""Define groups: one parameter or buffer and the optimizer's slots that are sliced, saved and restored with it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from scarctl.errors import Corruption
from scarctl.util.lazy import kept

DTYPES: dict[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}
"""Bytes per value of every safetensors dtype that has whole bytes."""

KINDS = ("parameter", "buffer")

MAX_BYTES = 1 << 60
MAX_DIMS = 64
MAX_NAME = 4096
RESERVED = ("scarctl/", "__metadata__")
"""Prefixes of tensor names that segments reserve."""


# Layouts ask tensors and groups for these numbers dozens of times, so they are kept: no slots.
@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a group: the parameter or buffer itself (`slot` ""), or an optimizer slot of it."""

    slot: str
    dtype: str
    """A name in `DTYPES`."""
    shape: tuple[int, ...]

    @kept
    def rows(self) -> int:
        """Length of dim 0; a 0-dim tensor is one row."""
        return self.shape[0] if self.shape else 1

    @kept
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return DTYPES[self.dtype] * math.prod(self.shape[1:])

    @kept
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    def of(self, shape: tuple[int, ...]) -> TensorSpec:
        """Return this slot for a parameter of another shape: with that shape, or still with one value per row."""
        return replace(self, shape=shape[: len(self.shape)])


@dataclass(frozen=True, slots=True)
class Place:
    """The part of a whole tensor that a group holds: the box at `offset` with the shape of the group's tensor."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]
    """Index of the box's first value, one entry per dimension."""


@dataclass(frozen=True)
class Group:
    """A parameter or buffer with its optimizer slots. All tensors have the same number of rows."""

    name: str
    kind: str
    """"parameter" or "buffer"."""
    rows_per_partition: int
    tensors: tuple[TensorSpec, ...]
    """The first is the parameter or buffer itself."""
    place: Place | None = None
    """The group's part of a tensor that several processes share; None if the group holds the whole tensor."""

    @kept
    def rows(self) -> int:
        return self.tensors[0].rows

    @property
    def box(self) -> Place:
        """Place in the whole tensor, even if the group holds all of it."""
        shape = self.tensors[0].shape
        return self.place or Place(shape, (0,) * len(shape))

    @property
    def first_row(self) -> int:
        """Index of its first row in the whole tensor."""
        return self.place.offset[0] if self.place is not None else 0

    @property
    def end_row(self) -> int:
        """Where the rows of the whole tensor end."""
        return self.place.shape[0] if self.place is not None else self.rows

    @kept
    def row_bytes(self) -> int:
        """Bytes of one row, over all tensors."""
        return sum(tensor.row_bytes for tensor in self.tensors)

    @kept
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    @kept
    def partitions(self) -> int:
        """Number of partitions; 0 when the group has no bytes, because there is nothing to save."""
        return -(-self.rows // self.rows_per_partition) if self.nbytes else 0

    def key(self, t: int) -> str:
        """Return the full name of tensor `t`, unique in the layout: the group's name, or name/slot."""
        slot = self.tensors[t].slot
        return f"{self.name}/{slot}" if slot else self.name


def group_fault(group: Group) -> str:
    """Return why the group cannot be part of a layout, or "". Allocates nothing that depends on a size in it."""
    name = group.name
    if not name or not is_text(name) or name.startswith(RESERVED):
        return f"{name!r} cannot be a tensor's name: it is empty, too long, not plain text or reserved"
    if group.kind not in KINDS:
        return f"tensor {name!r} is a {group.kind!r}, neither parameter nor buffer"
    if not group.tensors or group.tensors[0].slot:
        return f"tensor {name!r}: its values do not come before its slots"
    for t, tensor in enumerate(group.tensors):
        key = group.key(t)
        if not is_text(tensor.slot):
            return f"tensor {name!r} has a slot whose name is not plain text"
        if tensor.dtype not in DTYPES:
            return f"tensor {key!r} has an unknown dtype {tensor.dtype!r}"
        if len(tensor.shape) > MAX_DIMS or not all(0 <= size <= MAX_BYTES for size in tensor.shape):
            return f"tensor {key!r} has an impossible shape"
        if tensor.rows != group.tensors[0].rows:
            return f"tensor {key!r} has {tensor.rows} rows, {name!r} has {group.tensors[0].rows}"
    if not 1 <= group.rows_per_partition <= MAX_BYTES:
        return f"tensor {name!r} has {group.rows_per_partition} rows per partition"
    if group.place is not None and not _lies_within(group.place, group.tensors[0].shape):
        return f"tensor {name!r} does not lie within the whole tensor that it belongs to"
    return ""


def _lies_within(place: Place, shape: tuple[int, ...]) -> bool:
    return len(place.shape) == len(place.offset) == len(shape) > 0 and all(
        first >= 0 and first + size <= whole <= MAX_BYTES
        for first, size, whole in zip(place.offset, shape, place.shape, strict=True)
    )


def is_text(text: str) -> bool:
    """Return whether `text` fits a file's JSON header and one line of a terminal."""
    return len(text) <= MAX_NAME and text.isprintable()


def json_fields(obj: object, what: str, **types: type) -> list[Any]:
    """Return the values of the JSON object `obj`. Raises Corruption unless fields and types are exactly these."""
    if not isinstance(obj, dict) or obj.keys() != types.keys():
        raise Corruption(f"not a layout: the fields of {what} are not {', '.join(types)}")
    for field, wanted in types.items():
        if type(obj[field]) is not wanted:  # isinstance would take True for an int
            raise Corruption(f"not a layout: {field} of {what} is not of type {wanted.__name__}")
    return [obj[field] for field in types]


def group_from_json(obj: object) -> Group:
    """Return the group that `group_to_json` wrote. Takes hostile input: raises Corruption with the reason."""
    place = None
    if isinstance(obj, dict) and "place" in obj:
        obj = dict(obj)
        place = _place(obj.pop("place"))
    name, kind, rows, tensors = json_fields(
        obj, "a group", name=str, kind=str, rows_per_partition=int, tensors=list
    )
    return Group(name, kind, rows, tuple(_tensor(entry) for entry in tensors), place)


def group_to_json(group: Group) -> dict[str, Any]:
    """Return the group as JSON values; `place` is omitted when the group holds whole tensors."""
    tensors = [{"slot": t.slot, "dtype": t.dtype, "shape": list(t.shape)} for t in group.tensors]
    obj: dict[str, Any] = {
        "name": group.name,
        "kind": group.kind,
        "rows_per_partition": group.rows_per_partition,
        "tensors": tensors,
    }
    if group.place is not None:
        obj["place"] = {"shape": list(group.place.shape), "offset": list(group.place.offset)}
    return obj


def _place(obj: object) -> Place:
    shape, offset = json_fields(obj, "a place", shape=list, offset=list)
    if not all(type(size) is int for size in (*shape, *offset)):
        raise Corruption("not a layout: a place has entries that are not integers")
    return Place(tuple(shape), tuple(offset))


def _tensor(obj: object) -> TensorSpec:
    slot, dtype, shape = json_fields(obj, "a tensor", slot=str, dtype=str, shape=list)
    if not all(type(size) is int for size in shape):
        raise Corruption("not a layout: a shape has entries that are not integers")
    return TensorSpec(slot, dtype, tuple(shape))
