"""Cut a model's state into partitions, described by arrays and ranges, never by one object per partition.

A group is one parameter or buffer and the optimizer's slots of the same shape. It is cut along dim 0 into
partitions of `rows_per_partition` rows (the last may be shorter). Global partition ids number all partitions
of all groups in order: group g owns the ids [base[g], base[g + 1]). An embedding table may have ten million
partitions. So per-partition values are computed from ids with array operations, and names are made only for display.
"""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scarctl.errors import Corruption, UsageError
from scarctl.state.group import (
    DTYPES,
    KINDS,
    MAX_BYTES,
    Group,
    Place,
    TensorSpec,
    group_fault,
    group_from_json,
    group_to_json,
    is_text,
    json_fields,
)
from scarctl.util.arrays import Ids, take_rows
from scarctl.util.splitmix import mixed, splitmix64

__all__ = [
    "DTYPES",
    "KINDS",
    "Group",
    "Layout",
    "Place",
    "TensorSpec",
    "build_layout",
    "close_to",
]


MIN_PARTITION_BYTES = 4 << 10
MAX_PARTITION_BYTES = 1 << 20
"""Bounds of the default partition size, in bytes."""

MAX_PARTITIONS = 1 << 28
"""Most partitions of a layout, so that a file cannot demand arrays of any size."""
_ROWS = re.compile(r"(.+)\[(\d{0,18}):(\d{0,18})\]", re.ASCII | re.DOTALL)
BEYOND = "ends after the last row"  # a part of a message
_CHUNK = 1 << 15
"""Values per piece of an array computation: pieces that fit the cache are many times faster."""


class Layout:
    """The groups of a state in order, and their partitions. Immutable.

    Two layouts are equal when their digests are: same groups in the same order, cut the same way, and the
    same optimizer. Arrays that a layout returns and keeps are read-only.
    """

    def __init__(self, groups: Sequence[Group], optimizer: str = "") -> None:
        """`optimizer` is free text such as "AdamW". Raises UsageError if the groups cannot form a layout."""
        self._set(groups, optimizer, checked=False)

    def _set(self, groups: Sequence[Group], optimizer: str, *, checked: bool) -> Layout:
        self._groups = tuple(groups)
        self._optimizer = optimizer
        reason = "" if checked else _fault(self._groups, optimizer)
        counts = [] if reason else [group.partitions for group in self._groups]
        self._nbytes = 0 if reason else sum(group.nbytes for group in self._groups)
        if reason := reason or _excess(sum(counts), self._nbytes):
            raise UsageError(reason)
        self._base = _frozen(np.cumsum([0, *counts], dtype=np.int64))
        self._per_partition = np.array([g.rows_per_partition for g in self._groups], dtype=np.int64)
        self._rows = np.array([group.rows for group in self._groups], dtype=np.int64)
        self._digest: str | None = None
        self._partition_bytes: Ids | None = None
        return self

    @property
    def groups(self) -> tuple[Group, ...]:
        return self._groups

    @property
    def optimizer(self) -> str:
        return self._optimizer

    @property
    def base(self) -> Ids:
        """First partition id of every group, then the number of partitions: int64 of shape (groups + 1,)."""
        return self._base

    @property
    def partitions(self) -> int:
        return int(self._base[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of the whole state."""
        return self._nbytes

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON form: 64 hex digits."""
        if self._digest is None:
            text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
            self._digest = hashlib.sha256(text.encode()).hexdigest()
        return self._digest

    @property
    def partition_bytes(self) -> Ids:
        """Bytes of every partition, over all tensors of its group: int64 of shape (partitions,)."""
        if self._partition_bytes is None:
            result = np.empty(self.partitions, dtype=np.int64)
            for group, first, stop in zip(self._groups, self._base[:-1], self._base[1:], strict=True):
                if first < stop:
                    full = min(group.rows_per_partition, group.rows)
                    result[first : stop - 1] = full * group.row_bytes
                    result[stop - 1] = (group.rows - int(stop - first - 1) * full) * group.row_bytes
            self._partition_bytes = _frozen(result)
        return self._partition_bytes

    def bytes_of(self, ids: Ids) -> Ids:
        """Return the bytes of some partitions: int64 of the shape of `ids`. Allocates nothing for the others."""
        if self._partition_bytes is not None:
            return self._partition_bytes[ids]
        starts, stops = self.row_ranges(ids)
        per_row = np.array([group.row_bytes for group in self._groups] or [0], dtype=np.int64)
        return (stops - starts) * per_row[self.group_of(ids)]

    def group_of(self, ids: ArrayLike) -> Ids:
        """Return the index of every partition's group: int64 of the shape of `ids`.

        Raises IndexError for unknown ids.
        """
        array = np.asarray(ids, dtype=np.int64)
        if array.size and (array.min() < 0 or array.max() >= self.partitions):
            raise IndexError(f"partition ids are 0..{self.partitions - 1}")
        if array.ndim == 1 and array.size > self._base.size and bool((array[1:] >= array[:-1]).all()):
            # Ids usually ascend. Then finding the few groups among the ids is faster than the reverse.
            bounds = np.searchsorted(array, self._base)
            return np.repeat(np.arange(len(self._groups), dtype=np.int64), np.diff(bounds))
        return np.searchsorted(self._base, array, side="right").astype(np.int64, copy=False) - 1

    def row_ranges(self, ids: ArrayLike) -> tuple[Ids, Ids]:
        """Return first row and last row + 1 of every partition in its group: two int64 arrays of the shape of `ids`.

        Raises IndexError for unknown ids.
        """
        array = np.asarray(ids, dtype=np.int64)
        starts, stops = np.empty_like(array), np.empty_like(array)
        flat = array.reshape(-1)
        for first in range(0, flat.size, _CHUNK):
            part = slice(first, first + _CHUNK)
            g = self.group_of(flat[part])
            step = self._per_partition[g]
            start = (flat[part] - self._base[g]) * step
            starts.reshape(-1)[part] = start
            stops.reshape(-1)[part] = np.minimum(start + step, self._rows[g])
        return starts, stops

    def name(self, partition: int) -> str:
        """Return the name of a partition, such as "layers.3.mlp.weight[0:512]", with rows of the whole tensor.

        Raises IndexError for an unknown id.
        """
        starts, stops = self.row_ranges([partition])
        group = self._groups[int(self.group_of([partition])[0])]
        return f"{group.name}[{starts[0] + group.first_row}:{stops[0] + group.first_row}]"

    def match(self, pattern: str) -> Ids:
        """Return the ids of the partitions that `pattern` matches: int64, ascending.

        A pattern is a group's name or a shell pattern of names ('layers.3.*'). A range of the whole tensor's rows may
        follow, which matches every partition that overlaps it: 'emb.weight[100:200]', 'emb.*[:10]'.
        Raises UsageError when no partition matches, with the closest names.
        """
        groups, start, stop = self._parts(pattern)
        found = self._matching(groups)
        pieces = [self._overlapping(g, start, MAX_BYTES if stop is None else stop) for g in found]
        ids = np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)
        if not ids.size:
            names = [group.name for group in self._groups]
            raise UsageError(f"{pattern!r} {self._why_nothing(found)}", hint=close_to(groups, names))
        return ids

    def check_rows(self, pattern: str) -> None:
        """Raise UsageError if a pattern's range of rows ends after the last row of every tensor that it matches."""
        groups, start, stop = self._parts(pattern)
        last = max((self._groups[g].end_row for g in self._matching(groups)), default=0)
        if stop is not None and stop > last > 0:
            raise UsageError(
                f"{pattern!r} {BEYOND}: rows are 0:{last}",
                hint=f"up to the last row: {f'{groups}[{start}:]'!r}",
            )

    def _parts(self, pattern: str) -> tuple[str, int, int | None]:
        """Return the names that a pattern matches, the first row, and where its rows end, if it says so."""
        parts = _ROWS.fullmatch(pattern)
        # A group's name may end in text that looks like a range of rows: then the pattern is the name.
        if not parts or any(group.name == pattern for group in self._groups):
            return pattern, 0, None
        return parts[1], int(parts[2] or 0), int(parts[3]) if parts[3] else None

    def _matching(self, pattern: str) -> list[int]:
        # A name may contain brackets, which have another meaning in a pattern: so an exact name wins.
        exact = [g for g, group in enumerate(self._groups) if group.name == pattern]
        return exact or [
            g for g, group in enumerate(self._groups) if fnmatch.fnmatchcase(group.name, pattern)
        ]

    def _overlapping(self, g: int, start: int, stop: int) -> Ids:
        group, first = self._groups[g], int(self._base[g])
        start, stop = max(0, start - group.first_row), min(stop - group.first_row, group.rows)
        if start >= stop or not group.partitions:
            return np.empty(0, dtype=np.int64)
        step = group.rows_per_partition
        return np.arange(first + start // step, first - (-stop // step), dtype=np.int64)

    def _why_nothing(self, found: list[int]) -> str:
        if not found:
            return "matches no group"
        if not any(self._groups[g].partitions for g in found):
            return "has no partitions: it is empty"
        last = max(self._groups[g].first_row + self._groups[g].rows for g in found)
        first = min(self._groups[g].first_row for g in found)
        return f"matches no rows: rows are {first}:{last}"

    def shards(self, count: int, seed: int) -> NDArray[np.int32]:
        """Assign every partition to a shard at random: int32 of shape (partitions,), values in 0..count - 1.

        The numbers of partitions per shard differ by at most one. The same partitions, count and seed give
        the same result on every machine and in every version. Partitions are ranked by a splitmix64 hash of their id,
        which no two ids share. Raises UsageError when count is not in 1..2**31 - 1.
        """
        if not 1 <= count < 1 << 31:
            raise UsageError(f"{count} shards are impossible", hint="give at least 1 and fewer than 2**31")
        n = self.partitions
        result = np.zeros(n, dtype=np.int32)
        if count == 1 or n == 0:
            return result
        # Shard s takes the ranks from ceil(s * n / count). Hashes are distinct, so the least hash of a shard
        # separates its partitions from those of the shards before it.
        count = min(count, n)
        edges = -(-np.arange(1, count) * n // count)
        pieces = [(first, min(first + _CHUNK, n)) for first in range(0, n, _CHUNK)]
        state, hashes = mixed(seed), np.empty(n, dtype=np.uint64)

        def hashed(first: int, stop: int) -> NDArray[np.uint64]:
            return splitmix64(np.arange(first + 1, stop + 1), state)

        for first, stop in pieces:
            hashes[first:stop] = hashed(first, stop)
        hashes.partition(edges)
        lowest = hashes[edges]
        for first, stop in pieces:  # hashing again is cheaper than a second array
            result[first:stop] = np.searchsorted(lowest, hashed(first, stop), side="right")
        return result

    def to_json(self) -> dict[str, Any]:
        """Return the layout as JSON values; `from_json` reads it back."""
        return {"optimizer": self._optimizer, "groups": [group_to_json(group) for group in self._groups]}

    @classmethod
    def from_json(cls, obj: object) -> Layout:
        """Return the layout that `to_json` wrote. Takes hostile input: raises Corruption with the reason."""
        optimizer, groups = json_fields(obj, "the layout", optimizer=str, groups=list)
        try:
            return cls([group_from_json(entry) for entry in groups], optimizer)
        except UsageError as error:
            raise Corruption(f"not a layout: {error.message}") from error

    def differences(self, other: Layout) -> list[str]:
        """List the changes from this layout to `other`, one line each; empty if they are equal."""
        lines = []
        if self._optimizer != other._optimizer:
            lines.append(f"optimizer {self._optimizer or 'none'} -> {other._optimizer or 'none'}")
        mine = {group.name: group for group in self._groups}
        theirs = {group.name: group for group in other._groups}
        for name, group in mine.items():
            lines += _changes(group, theirs.get(name))
        lines += [f"tensor {name!r} new" for name in theirs if name not in mine]
        if not lines and self != other:
            lines.append("the tensors are in another order")
        return lines

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<Layout {len(self._groups)} groups, {self.partitions} partitions, {self._nbytes} bytes>"


Cuttable: TypeAlias = (
    tuple[str, str, tuple[TensorSpec, ...]] | tuple[str, str, tuple[TensorSpec, ...], Place | None]
)
"""A group before it is cut: name, kind, tensors[, place]."""


def build_layout(
    groups: Iterable[Cuttable],
    *,
    partition_bytes: int | None = None,
    rows: Mapping[str, int] | None = None,
    by_layer: bool = False,
    optimizer: str = "",
    elsewhere: Collection[str] = (),
) -> Layout:
    """Cut groups, given as (name, kind, tensors[, place]), into partitions of about `partition_bytes`.

    partition_bytes: default is a 1024th of the state, at least 4 KiB and at most 1 MiB. A smaller group is
        one partition, and so is a larger row.
    rows: rows per partition by shell pattern of group names. The first match wins, even over by_layer.
    by_layer: every group is one partition.
    elsewhere: names of other ranks' groups, which patterns of `rows` may match as well.

    Raises UsageError for duplicate names, tensors of one group with different numbers of rows, sizes below 1,
    and patterns of `rows` that match no group.
    """
    whole = [Group(name, kind, 1, tuple(tensors), *place) for name, kind, tensors, *place in groups]
    # The coarsest cut checks the groups first, because the sizes below rely on valid ones.
    coarse = Layout([_cut(group, max(1, group.rows) if group.tensors else 1) for group in whole], optimizer)
    if partition_bytes is None:
        partition_bytes = min(max(coarse.nbytes // 1024, MIN_PARTITION_BYTES), MAX_PARTITION_BYTES)
    for what, size in {"partition_bytes": partition_bytes, **(rows or {})}.items():
        if size < 1:
            raise UsageError(f"{what!r} is {size}: give at least 1")
    names = [*(group.name for group in whole), *elsewhere]
    for pattern in rows or {}:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise UsageError(f"rows: {pattern!r} matches no group", hint=close_to(pattern, names))

    def rows_of(group: Group) -> int:
        for pattern, given in (rows or {}).items():
            if fnmatch.fnmatchcase(group.name, pattern):
                return given
        if by_layer or group.nbytes <= partition_bytes:
            return group.rows
        return partition_bytes // group.row_bytes

    # Only the sizes are new: checking ten thousand groups again takes as long as cutting them.
    return object.__new__(Layout)._set([_cut(g, rows_of(g)) for g in whole], optimizer, checked=True)


def close_to(name: str, names: Iterable[str]) -> str:
    """Return a hint for an unknown name: the closest of `names`, otherwise the first few."""
    names = list(names)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    if not names:
        return "the layout has no groups"
    more = ", ..." if len(names) > 3 else ""
    return f"known names are {', '.join(map(repr, names[:3]))}{more}"


def _cut(group: Group, rows_per_partition: int) -> Group:
    rows = min(max(1, rows_per_partition), max(1, group.rows) if group.tensors else 1)
    return Group(group.name, group.kind, rows, group.tensors, group.place)


def _changes(old: Group, new: Group | None) -> list[str]:
    if new is None:
        return [f"tensor {old.name!r} missing"]
    lines = []
    mine = {t.slot: (old.key(i), t) for i, t in enumerate(old.tensors)}
    theirs = {t.slot: (new.key(i), t) for i, t in enumerate(new.tensors)}
    for slot, (key, tensor) in mine.items():
        if slot not in theirs:
            lines.append(f"tensor {key!r} missing")
            continue
        twin = theirs[slot][1]
        if tensor.shape != twin.shape:
            lines.append(f"tensor {key!r} resized {tensor.shape} -> {twin.shape}")
        if tensor.dtype != twin.dtype:
            lines.append(f"tensor {key!r} dtype {tensor.dtype} -> {twin.dtype}")
    lines += [f"tensor {key!r} new" for slot, (key, _) in theirs.items() if slot not in mine]
    if not lines and list(mine) != list(theirs):
        lines.append(f"tensor {old.name!r} has its slots in another order")
    if old.kind != new.kind:
        lines.append(f"tensor {old.name!r} was a {old.kind}, and is a {new.kind}")
    if old.place != new.place:
        lines.append(
            f"tensor {old.name!r} is another part of the whole tensor: {_where(old)} -> {_where(new)}"
        )
    if old.rows_per_partition != new.rows_per_partition and old.rows == new.rows:
        per = f"{old.rows_per_partition} -> {new.rows_per_partition}"
        lines.append(f"tensor {old.name!r} rows per partition {per}")
    return lines


def _where(group: Group) -> str:
    return "all of it" if group.place is None else f"from {group.place.offset} of {group.place.shape}"


# --- soundness ----------------------------------------------------------------------------------------------


def _fault(groups: Sequence[Group], optimizer: str) -> str:
    """Return why the groups cannot form a layout, or "". Allocates nothing that depends on a size in them."""
    if not is_text(optimizer):
        return "the optimizer's name is not plain text"
    keys: set[str] = set()
    for group in groups:
        if reason := group_fault(group):
            return reason
        for t in range(len(group.tensors)):
            key = group.key(t)
            if key in keys:
                return f"two tensors are named {key!r}"
            keys.add(key)
    return ""


def _excess(partitions: int, nbytes: int) -> str:
    """Return which limit the groups together exceed, or ""."""
    if partitions > MAX_PARTITIONS:
        return f"{partitions} partitions exceed the limit of {MAX_PARTITIONS}: use larger ones"
    return f"a state of {nbytes} bytes exceeds the limit of {MAX_BYTES}" if nbytes > MAX_BYTES else ""


# --- arrays -------------------------------------------------------------------------------------------------


def _frozen(array: Ids) -> Ids:
    array.setflags(write=False)
    return array


def rows_of(layout: Layout, g: int, ids: Ids) -> slice | Ids:
    """Return an index that picks the rows of `ids` (ascending, of group `g`): a slice if they are adjacent."""
    if len(ids):
        first, last = int(ids[0]), int(ids[-1])
        if last - first == len(ids) - 1:  # without arrays: a restore asks for thousands of single partitions
            group, base = layout.groups[g], int(layout.base[g])
            step = group.rows_per_partition
            return slice((first - base) * step, min((last - base + 1) * step, group.rows))
    return take_rows(*layout.row_ranges(ids))
