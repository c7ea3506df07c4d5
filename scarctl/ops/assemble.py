"""Assemble whole tensors of a file from the boxes in the shares.

A rank has a box of a whole tensor (`scarctl.state.group.Place`); a single process has the whole tensor. Partitions are
rows of that box. A file has the whole tensor, or pieces if only a part is restored. A piece `name[start:stop]` has
rows of the whole tensor; `name[0:4,8:16]` is a box that is narrower than the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from scarctl.errors import Corruption, NoIntactCopy
from scarctl.formats.state_writer import Rows
from scarctl.state.group import DTYPES, Group, TensorSpec
from scarctl.state.layout import Layout
from scarctl.util.arrays import Ids

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of a file: a box of a whole tensor."""

    name: str
    suffix: str
    """Suffix of the tensor's name that names the box; "" for the whole tensor."""
    offset: Shape
    """Offset of the box, in values of the parameter."""
    shape: Shape
    """Shape of the box, in values of the parameter."""

    def key(self, group: Group, t: int) -> str:
        """Return the name of the group's tensor `t` in the file."""
        return group.key(t) + self.suffix


@dataclass(frozen=True, slots=True)
class Runs:
    """Targets of the rows of one rank's group: rows from `starts[i]` on go to `targets[i]`; ascending."""

    starts: Ids
    targets: Sequence[Target]


Plan: TypeAlias = Mapping[int, Runs]
"""Runs by group of a layout."""


def whole_groups(layouts: Iterable[Layout]) -> dict[str, Group]:
    """Return the whole tensors of all boxes in the layouts, by stored name. Raises Corruption if two boxes disagree."""
    found: dict[str, Group] = {}
    for layout in layouts:
        for group in layout.groups:
            tensors = tuple(
                replace(spec, shape=_whole_shape(group, t)) for t, spec in enumerate(group.tensors)
            )
            whole = Group(group.name, group.kind, max(1, tensors[0].rows), tensors)
            if found.setdefault(group.name, whole) != whole:
                raise Corruption(
                    f"two shards have different shapes or dtypes of tensor {group.name!r}",
                    hint="the store is damaged",
                )
    return found


def content(layouts: Sequence[Layout], ids: Sequence[Ids]) -> tuple[dict[str, TensorSpec], list[Plan]]:
    """Return the tensors of a new file with the partitions `ids` (ascending) of each layout, and the targets of rows.

    A tensor is whole if all its rows are restored, otherwise in pieces. A file with all partitions also contains the
    tensors without values.
    """
    wholes = whole_groups(layouts)
    pieces: dict[str, list[tuple[int, int, int, int]]] = {}  # name: (layout, group, start, stop)
    for n, (layout, mine) in enumerate(zip(layouts, ids, strict=True)):
        for g, start, stop in _runs(layout, mine):
            pieces.setdefault(layout.groups[g].name, []).append((n, g, start, stop))
    everything = all(len(mine) == layout.partitions for layout, mine in zip(layouts, ids, strict=True))
    specs: dict[str, TensorSpec] = {}
    plans: list[dict[int, list[tuple[int, Target]]]] = [{} for _ in layouts]
    for name, whole in wholes.items():
        there = pieces.get(name, [])
        boxes = [_box(layouts[n].groups[g], start, stop) for n, g, start, stop in there]
        targets = _targets(whole, boxes) if there else []
        if not there and not (everything and not whole.nbytes):
            continue
        for target in targets or [_all_of(whole)]:
            for t, spec in enumerate(whole.tensors):
                shape = target.shape if spec.shape == whole.tensors[0].shape else _rows_of(spec, target)
                specs[target.key(whole, t)] = TensorSpec("", spec.dtype, shape)
        for (n, g, start, _), target in zip(there, targets, strict=True):
            plans[n].setdefault(g, []).append((start, target))
    return specs, [
        {g: Runs(np.array([a for a, _ in runs]), [t for _, t in runs]) for g, runs in plan.items()}
        for plan in plans
    ]


def onto(layouts: Sequence[Layout]) -> list[Plan]:
    """Return the targets of the rows of all partitions, for a file that has the whole tensors."""
    wholes = whole_groups(layouts)
    return [
        {g: Runs(np.array([0]), [_all_of(wholes[group.name])]) for g, group in enumerate(layout.groups)}
        for layout in layouts
    ]


def check_complete(layouts: Sequence[Layout]) -> None:
    """Raise NoIntactCopy unless the boxes of the layouts cover every tensor without overlap."""
    boxes: dict[str, list[tuple[Shape, Shape]]] = {}
    for layout in layouts:
        for group in layout.groups:
            if group.nbytes:
                boxes.setdefault(group.name, []).append(_box(group, 0, group.rows))
    for name, whole in whole_groups(layouts).items():
        mine = sorted(boxes.get(name, []))
        size = sum(_extent(shape) for _, shape in mine)
        if whole.nbytes and (size != _extent(whole.tensors[0].shape) or _any_overlap(mine)):
            raise NoIntactCopy(
                f"tensor {name!r} is not complete in this store: the saved parts have {size} of its values",
                hint="nothing was written; `scarctl inspect` shows which ranks have saved",
            )


def units(group: Group, t: int, rows: Rows, target: Target) -> tuple[Rows, int]:
    """Return the units of the target that rows of a group's tensor `t` occupy, and the bytes of a unit.

    A unit is a row if the group is as wide as the target, otherwise a run of values that is contiguous in both.
    """
    spec, offset = group.tensors[t], group.box.offset
    if not spec.shape:
        return slice(0, 1), spec.nbytes
    shift = offset[0] - target.offset[0]
    if spec.shape != group.tensors[0].shape or spec.shape[1:] == target.shape[1:]:
        at = slice(rows.start + shift, rows.stop + shift) if isinstance(rows, slice) else rows + shift
        return at, spec.row_bytes
    numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
    narrow = max(d for d in range(1, len(spec.shape)) if spec.shape[d] != target.shape[d])
    ours, theirs = spec.shape[narrow], target.shape[narrow]
    skip = offset[narrow] - target.offset[narrow]
    unit = math.gcd(ours, theirs, skip)
    found = numbers + shift
    for d in range(1, narrow):
        within = np.arange(spec.shape[d]) + (offset[d] - target.offset[d])
        found = (found[:, None] * target.shape[d] + within).reshape(-1)
    within = np.arange(ours // unit) + skip // unit
    found = (found[:, None] * (theirs // unit) + within).reshape(-1)
    return found, unit * math.prod(spec.shape[narrow + 1 :]) * DTYPES[spec.dtype]


# -- boxes -------------------------------------------------------------------------------------------------------


def _whole_shape(group: Group, t: int) -> Shape:
    """Return the whole shape of tensor `t`. A slot of another shape than the parameter's is divided by rows only."""
    spec, place = group.tensors[t], group.box
    if spec.shape == group.tensors[0].shape:
        return place.shape
    return (place.shape[0], *spec.shape[1:]) if place.shape else spec.shape


def _all_of(whole: Group) -> Target:
    shape = whole.tensors[0].shape
    return Target(whole.name, "", (0,) * len(shape), shape)


def _rows_of(spec: TensorSpec, target: Target) -> Shape:
    return (target.shape[0], *spec.shape[1:]) if spec.shape else ()


def _box(group: Group, start: int, stop: int) -> tuple[Shape, Shape]:
    """Return offset and shape of some rows of a group in the whole tensor."""
    place, shape = group.box, group.tensors[0].shape
    if not shape:
        return (), ()
    return (place.offset[0] + start, *place.offset[1:]), (stop - start, *shape[1:])


def _extent(shape: Shape) -> int:
    """Return the number of values. A row without values counts as one, because a slot may have values there."""
    return math.prod(shape[:1]) * math.prod(max(1, n) for n in shape[1:])


def _runs(layout: Layout, ids: Ids) -> Iterable[tuple[int, int, int]]:
    """Yield adjacent rows of partitions (ascending), as group, first row, last row + 1."""
    bounds = np.searchsorted(ids, layout.base)
    for g in range(len(layout.groups)):
        starts, stops = layout.row_ranges(ids[bounds[g] : bounds[g + 1]])
        if len(starts):
            breaks = np.flatnonzero(starts[1:] != stops[:-1])
            begins = starts[np.concatenate(([0], breaks + 1))].tolist()
            ends = stops[np.append(breaks, len(stops) - 1)].tolist()
            for begin, end in zip(begins, ends, strict=True):
                yield g, begin, end


def _targets(whole: Group, boxes: Sequence[tuple[Shape, Shape]]) -> list[Target]:
    """Return the target of each box: the whole tensor, or the largest possible pieces."""
    shape = whole.tensors[0].shape
    if not shape or sum(_extent(size) for _, size in boxes) == _extent(shape):
        return [_all_of(whole)] * len(boxes)
    if any(size[1:] != shape[1:] for _, size in boxes):
        return [_piece(whole, offset, size) for offset, size in boxes]
    order = sorted(range(len(boxes)), key=lambda i: boxes[i][0][0])
    found: dict[int, Target] = {}
    first = 0
    for k, i in enumerate(order):
        end = boxes[i][0][0] + boxes[i][1][0]
        if k + 1 == len(order) or boxes[order[k + 1]][0][0] != end:
            begin = boxes[order[first]][0][0]
            target = _piece(whole, (begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:]))
            found |= dict.fromkeys(order[first : k + 1], target)
            first = k + 1
    return [found[i] for i in range(len(boxes))]


def _piece(whole: Group, offset: Shape, shape: Shape) -> Target:
    dims = 1 if shape[1:] == whole.tensors[0].shape[1:] else len(shape)
    spans = ",".join(f"{a}:{a + n}" for a, n in zip(offset[:dims], shape[:dims], strict=True))
    return Target(whole.name, f"[{spans}]", offset, shape)


def _any_overlap(boxes: Sequence[tuple[Shape, Shape]]) -> bool:
    """Return whether two of the boxes (in order) overlap."""
    for i, (offset, shape) in enumerate(boxes):
        for other, size in boxes[i + 1 :]:
            if not offset or other[0] >= offset[0] + shape[0]:
                break
            if all(a < b + m and b < a + n for a, n, b, m in zip(offset, shape, other, size, strict=True)):
                return True
    return len(boxes) > 1 and not boxes[0][0]
