"""Divide the rows of all tensors among the ranks that hold them, so that every byte is saved once.

A rank's *holding* is a group of its adapter: a box of a whole tensor. Ranks of one *scope* that hold the same box hold
the same values. Every rank computes the same division from the holdings of all ranks, without communication.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import Corruption, UsageError
from scarctl.state.group import DTYPES, Group, Place, TensorSpec, group_fault, is_text, json_fields
from scarctl.store.format import canonical
from scarctl.util.collection import without_collection

ROLES = ("own", "shared", "replica")

WHOLE_BYTES = 64 << 10
"""A tensor with fewer bytes is not divided among the ranks that hold it."""
_MAX_CUT_DIMS = 6
_HINT = "do all ranks build the same model, wrapped in the same way?"

_Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # offset, shape


@dataclass(frozen=True, slots=True)
class Holding:
    """One group of one rank, without the optimizer's slots: ownership is the same before they exist."""

    name: str
    kind: str
    """"parameter" or "buffer"."""
    role: str
    """See `scarctl.adapter.StateGroup.role`."""
    dtype: str
    """A name in `scarctl.state.group.DTYPES`."""
    shape: tuple[int, ...]
    """Shape of this rank's part."""
    place: Place | None = None
    scope: str = ""
    """Only ranks with the same scope hold the same tensor under this name; "": all ranks."""

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self.place.shape if self.place is not None else self.shape

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of this rank's part."""
        return DTYPES[self.dtype] * math.prod(self.shape[1:])

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, from which `from_json` makes an equal holding."""
        place = None if self.place is None else [list(self.place.shape), list(self.place.offset)]
        return {
            "name": self.name,
            "kind": self.kind,
            "role": self.role,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "place": [] if place is None else place,
            "scope": self.scope,
        }

    @classmethod
    def from_json(cls, obj: object) -> Holding:
        """Read the JSON values of another rank's `to_json`. Raises UsageError if they are not a holding."""
        try:
            name, kind, role, dtype, shape, place, scope = json_fields(
                obj, "a holding", name=str, kind=str, role=str, dtype=str, shape=list, place=list, scope=str
            )
        except Corruption as error:
            raise UsageError(error.message, hint="do all ranks run the same scarctl?") from error
        lists = [shape, *place]
        if len(place) not in (0, 2) or not all(type(item) is list for item in lists):
            raise UsageError(f"tensor {name!r}: its place is not a shape and an offset")
        if not all(type(size) is int for item in lists for size in item):
            raise UsageError(f"tensor {name!r}: its shape and place are not integers")
        if role not in ROLES or not is_text(scope):
            raise UsageError(f"tensor {name!r} has the role {role!r}, not one of {', '.join(ROLES)}")
        holding = cls(
            name, kind, role, dtype, tuple(shape), Place(*map(tuple, place)) if place else None, scope
        )
        fault = group_fault(Group(name, kind, 1, (TensorSpec("", dtype, holding.shape),), holding.place))
        if fault:
            raise UsageError(fault)
        return holding


class Owned(NamedTuple):
    """Rows that one rank saves."""

    group: int
    """Index into the rank's holdings."""
    name: str
    """Stored name of the whole tensor. All parts of a tensor have the same one, different tensors different ones."""
    start: int
    stop: int
    """First row and last row + 1 of the rank's own part."""
    place: Place | None
    """Place of these rows in the whole tensor; None: they are the whole tensor."""


@dataclass(frozen=True, slots=True)
class Holders:
    """The ranks that hold one box of a tensor."""

    name: str
    """Stored name of the tensor."""
    groups: Mapping[int, int]
    """Index into the rank's holdings, by rank, ascending."""
    sharing: tuple[int, ...]
    """The holders that also have the optimizer's slots, ascending."""


class Copy(NamedTuple):
    """Rows that other ranks hold in addition to their owner."""

    owner: int
    start: int
    stop: int
    """Rows of the box, which are the same in every holder's part."""
    holders: Holders


@dataclass(frozen=True, slots=True)
class Division:
    """The owners of all rows. Equal on all ranks."""

    owned: tuple[tuple[Owned, ...], ...]
    """Owned rows by rank, in the order of its holdings."""
    names: tuple[tuple[str, ...], ...]
    """Stored name by rank and holding, even if the rank owns no row of the holding."""
    copies: tuple[Copy, ...]

    @property
    def apart(self) -> bool:
        """Whether every rank owns rows of each tensor that it holds: its own layout then has the slots of all."""
        owned = ({part.name for part in parts} for parts in self.owned)
        return all(own.issuperset(held) for own, held in zip(owned, self.names, strict=True))


class _Held(NamedTuple):
    rank: int
    group: int
    holding: Holding


class _Part(NamedTuple):
    """A distinct box of a tensor, and the ranks that hold it."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    row_bytes: int
    holders: Holders

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1


@without_collection()
def divide(holdings: Sequence[Sequence[Holding]]) -> Division:
    """Divide the state that `holdings[rank]` describe among the ranks.

    Rows that several ranks hold are cut into equal parts. A tensor below `WHOLE_BYTES` is not cut. Two ranks that hold
    the same rows differ by at most two rows or twice `WHOLE_BYTES`, whichever is more. The lowest holder owns a
    buffer. A part without elements has no owner.

    Raises UsageError, naming tensor and ranks, if the parts of a tensor overlap or leave a gap. Raises it also if ranks
    describe a tensor differently, or if all its holders are replicas.
    """
    names = [[""] * len(held) for held in holdings]
    owned: list[list[Owned]] = [[] for _ in holdings]
    copies: list[Copy] = []
    shared: dict[tuple[int, ...], list[_Part]] = {}
    for stored, holders in _tensors(holdings):
        for rank, group, _ in holders:
            names[rank][group] = stored
        whole, buffer = holders[0].holding.whole, holders[0].holding.kind == "buffer"
        for (offset, shape), same in _boxes(holders):
            if len(same) == 1 and same[0].holding.role != "replica":
                rank, group, holding = same[0]
                place = None if shape == whole else holding.place
                owned[rank].append(Owned(group, stored, 0, shape[0] if shape else 1, place))
                continue
            part = _part(stored, whole, offset, shape, same)
            sharing = part.holders.sharing
            if len(sharing) > 1 and not buffer:
                shared.setdefault(sharing, []).append(part)
            else:
                _give(part, sharing[0], 0, part.rows, owned, copies)
    for ranks, parts in shared.items():
        for part, i, start, stop in _cut(parts, len(ranks)):
            _give(part, ranks[i], start, stop, owned, copies)
    copies.sort(key=lambda copy: (copy.owner, copy.holders.name, copy.start))
    return Division(
        tuple(tuple(sorted(own, key=itemgetter(0))) for own in owned), tuple(map(tuple, names)), tuple(copies)
    )


def _tensors(holdings: Sequence[Sequence[Holding]]) -> list[tuple[str, list[_Held]]]:
    """Return (stored name, holders by rank) of every tensor, sorted by name: an adapter's order does not matter."""
    by_name: dict[str, dict[str | int, list[_Held]]] = {}
    for rank, held in enumerate(holdings):
        for group, holding in enumerate(held):
            scopes = by_name.setdefault(holding.name, {})
            holders = scopes.setdefault(rank if holding.role == "own" else holding.scope, [])
            holders.append(_Held(rank, group, holding))
    found: dict[str, list[_Held]] = {}
    for name, scopes in sorted(by_name.items()):
        for holders in scopes.values():
            stored = name if len(scopes) == 1 else f"{name}@{holders[0].rank}"
            if stored in found or (stored != name and stored in by_name):
                raise UsageError(
                    f"two tensors would be stored as {stored!r}", hint=f"rename the parameter {stored!r}"
                )
            found[stored] = holders
    return list(found.items())


def _boxes(holders: list[_Held]) -> list[tuple[_Box, list[_Held]]]:
    """Return the distinct boxes of one tensor and their holders, in the order of offsets. Raises as `divide` does."""
    first = holders[0].holding
    name, kind, dtype, whole = first.name, first.kind, first.dtype, first.whole
    zero = (0,) * len(whole)
    boxes: dict[_Box, list[_Held]] = {}
    last = -1
    for held in holders:
        rank, _, holding = held
        if rank == last:
            raise UsageError(f"rank {last} has two tensors of the name {name!r}")
        last = rank
        shape, place = holding.shape, holding.place
        if place is None:
            extent, offset = shape, zero
        else:
            extent, offset = place.shape, place.offset
        if extent != whole or holding.dtype != dtype or holding.kind != kind:
            raise UsageError(
                f"tensor {name!r} is a {_what(first)} on rank {holders[0].rank} and a {_what(holding)} on rank {rank}: "
                "ranks with different models",
                hint=_HINT,
            )
        if 0 not in shape:
            same = boxes.get((offset, shape))
            if same is None:
                boxes[offset, shape] = [held]
            else:
                same.append(held)
    if 0 not in whole and not _make_up(whole, boxes):
        raise UsageError(_fault(name, boxes), hint=_HINT)
    return sorted(boxes.items(), key=itemgetter(0))


def _part(
    name: str, whole: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...], same: list[_Held]
) -> _Part:
    """Return the part for a box that several ranks hold. Raises UsageError if all of them are replicas."""
    sharing = tuple(held.rank for held in same if held.holding.role != "replica")
    if not sharing:
        ranks = _listed(held.rank for held in same)
        raise UsageError(
            f"tensor {same[0].holding.name!r}: {ranks} have replicas, but no rank owns it", hint=_HINT
        )
    groups = {held.rank: held.group for held in same}
    return _Part(offset, shape, whole, same[0].holding.row_bytes, Holders(name, groups, sharing))


def _make_up(whole: tuple[int, ...], boxes: Iterable[_Box]) -> bool:
    """Return whether every element of the whole lies in exactly one box."""
    every = [*boxes, ((0,) * len(whole), whole)]
    shapes = {shape for _, shape in every}
    dims = [d for d in range(len(whole)) if any(shape[d] != whole[d] for shape in shapes)]
    if not dims:
        return len(every) == 2
    if len(dims) == 1:
        d, end = dims[0], 0
        for first, size in sorted((offset[d], shape[d]) for offset, shape in every[:-1]):
            if first != end:
                return False
            end += size
        return end == whole[d]
    if len(dims) > _MAX_CUT_DIMS:
        return False
    return _corners_cancel(
        np.array([[offset[d] for d in dims] for offset, _ in every], dtype=np.int64),
        np.array([[shape[d] for d in dims] for _, shape in every], dtype=np.int64),
    )


def _corners_cancel(low: NDArray[np.int64], size: NDArray[np.int64]) -> bool:
    """Return whether all boxes but the last make up the last. Both arrays have shape (boxes, dimensions).

    The boxes make up the whole if and only if their indicator functions add up to that of the whole. That is so if and
    only if their mixed differences add up. A mixed difference consists of the corners with alternating signs, so these
    have to cancel out.
    """
    signs = np.ones(len(low), dtype=np.int64)
    signs[-1] = -1
    corners, weights = [], []
    for side in np.ndindex(*[2] * low.shape[1]):
        corners.append(low + size * np.array(side))
        weights.append(signs * (-1) ** sum(side))
    # One number per corner: numpy sorts numbers many times faster than rows.
    table = [np.unique(column, return_inverse=True)[1] for column in np.concatenate(corners).T]
    sizes = [int(column.max()) + 1 for column in table]
    if math.prod(sizes) >= 1 << 62:
        return False
    where = np.unique(np.ravel_multi_index(tuple(table), sizes), return_inverse=True)[1]
    return not np.bincount(where, weights=np.concatenate(weights)).any()


def _fault(name: str, boxes: Mapping[_Box, list[_Held]]) -> str:
    """Return the reason why boxes do not make up their tensor."""
    sweep = sorted(boxes)
    for i, (offset, shape) in enumerate(sweep):
        for other in sweep[i + 1 :]:
            if other[0][0] >= offset[0] + shape[0]:
                break
            spans = zip(offset, shape, *other, strict=True)
            if all(a < b + n and b < a + m for a, m, b, n in spans):
                ranks = _listed(held[0].rank for held in (boxes[offset, shape], boxes[other]))
                return f"{ranks} hold different parts of tensor {name!r} that overlap"
    return f"tensor {name!r} has elements that no rank holds: {_listed(h[0].rank for h in boxes.values())} have parts"


def _cut(parts: list[_Part], count: int) -> Iterable[tuple[_Part, int, int, int]]:
    """Yield (part, index of the share, first row, last row + 1) of `count` shares of equal bytes, in order."""
    ends = list(accumulate(part.rows * part.row_bytes for part in parts))
    cuts = [(0, 0)]  # part, row
    for i in range(1, count):
        at = ends[-1] * i // count
        p = bisect_right(ends, at)
        part, inside = parts[p], at - (ends[p - 1] if p else 0)
        nbytes = part.rows * part.row_bytes
        step = part.row_bytes if nbytes >= WHOLE_BYTES else nbytes
        row = (inside + step // 2) // step * step // part.row_bytes
        cuts.append((p, row) if row < part.rows else (p + 1, 0))
    cuts.append((len(parts), 0))
    for i, ((p, row), (stop_p, stop_row)) in enumerate(pairwise(cuts)):
        while (p, row) < (stop_p, stop_row):
            stop = stop_row if p == stop_p else parts[p].rows
            yield parts[p], i, row, stop
            p, row = p + 1, 0


def _give(
    part: _Part, rank: int, start: int, stop: int, owned: list[list[Owned]], copies: list[Copy]
) -> None:
    """Make `rank` the owner of the rows."""
    place = None
    if (stop - start, *part.shape[1:]) != (part.whole if part.whole else (1,)):
        place = Place(part.whole, (part.offset[0] + start, *part.offset[1:]))
    owned[rank].append(Owned(part.holders.groups[rank], part.holders.name, start, stop, place))
    if len(part.holders.groups) > 1:
        copies.append(Copy(rank, start, stop, part.holders))


def _what(holding: Holding) -> str:
    return f"{holding.kind} of {holding.dtype} {list(holding.whole)}"


def _listed(ranks: Iterable[int]) -> str:
    few = sorted(ranks)
    text = ", ".join(map(str, few[:8])) + (", ..." if len(few) > 8 else "")
    return f"rank{'s' if len(few) > 1 else ''} {text}"


def digest_of(division: Division) -> str:
    """Return the SHA-256 of the rows that each rank owns."""
    owned = [
        [
            [
                part.name,
                part.stop - part.start,
                part.place and [list(part.place.shape), list(part.place.offset)],
            ]
            for part in rank
        ]
        for rank in division.owned
    ]
    return hashlib.sha256(canonical(owned)).hexdigest()
