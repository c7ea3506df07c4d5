"""Read a state that one set of ranks saved in parts for another number of ranks, or for one file.

Wanted parts and saved parts are boxes of whole tensors (`scarctl.state.group.Place`). The overlap of two boxes is
copied.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import Corruption, LayoutMismatch, NoIntactCopy
from scarctl.recovery.label import NO_COMMIT
from scarctl.state.group import DTYPES, Group, Place, TensorSpec
from scarctl.state.label import SEVERAL, Label
from scarctl.state.layout import Layout
from scarctl.state.version import NEVER
from scarctl.store import ShardState, Snapshot, Store, sealed_sets
from scarctl.store.backing import check_backed
from scarctl.store.read import Batch
from scarctl.store.shard_state import Damage
from scarctl.store.topology import Topology, read_topology, topology_epochs
from scarctl.util.arrays import Ids, take_rows

Rows: TypeAlias = Callable[[int, int], NDArray[np.uint8]]
"""Returns the destination of tensor t of group g: a writable view, uint8 of shape (rows, bytes per row)."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A complete state in shards, each of which may have a layout of its own."""

    store: Store
    states: Mapping[int, ShardState]
    """States by shard; if ranks saved them, in the order of the ranks."""
    topology: Topology | None = None
    """Topology of these ranks; None if one process saved the whole state."""
    passed_over: tuple[int, ...] = ()
    """Epochs of newer topologies, of other shards, without a complete state."""
    hidden: tuple[Damage, ...] = ()
    """Damage in the logs of these topologies: one of them may have had a complete state."""
    named: Mapping[int, Layout] = field(default_factory=dict)
    """By shard, layouts with the names that groups have in the whole state, if the shard's own names differ."""

    @property
    def layouts(self) -> dict[str, Layout]:
        """Layouts of all parts, by digest, with the names of the whole state."""
        found = [self.named.get(shard, state.layout) for shard, state in self.states.items()]
        return {layout.digest: layout for layout in found if layout is not None}

    def groups(self) -> dict[str, Group]:
        """Return one group of every whole tensor, by name: with its slots, and the whole shape in `place`."""
        found: dict[str, Group] = {}
        for layout in self.layouts.values():
            for group in layout.groups:
                found.setdefault(group.name, replace(group, place=group.box))
        return found

    @property
    def world(self) -> int:
        """Number of processes that saved the state."""
        return 1 if self.topology is None else len(self.topology.shards)

    @property
    def optimizer(self) -> str:
        """Name of the optimizer, the same in all parts."""
        return next((layout.optimizer for layout in self.layouts.values()), "")

    @property
    def whole(self) -> str:
        """Identity of the commit of the whole state that contains all copies (`Record.whole`); "" if none does."""
        found = {state.whole for state in self.states.values() if len(state.ids)}
        return found.pop() if len(found) == 1 else ""

    @property
    def label(self) -> Label:
        """The label of all copies, without what was saved with them."""
        label = Label.of(np.concatenate([state.version for state in self.states.values()]))
        if label.oldest_step != label.newest_step:
            return label.because(SEVERAL)
        return label if self.whole else label.because(NO_COMMIT)

    def copy_into(self, layout: Layout, rows: Rows, *, newest_first: bool = False) -> None:
        """Copy the groups of `layout`, boxes of the same tensors, from all parts that overlap. Verify every copy.

        newest_first: parts may have the same rows, and rows without a copy. Each row is taken from the first part, in
            the order of `states`, that has a copy of it.

        Raises NoIntactCopy when a copy is damaged or missing. Then only some rows were written.
        """
        there = self.groups()
        wanted = {_source(group, there): (g, group) for g, group in enumerate(layout.groups)}
        missing = [np.ones(group.rows if newest_first else 0, bool) for group in layout.groups]
        copied = 0
        for shard, state in self.states.items():
            theirs = self.named.get(shard, state.layout)
            if theirs is None:
                continue
            ids = [_NONE]
            for n, group in enumerate(theirs.groups):
                if group.name in wanted:
                    g, target = wanted[group.name]
                    found = _overlapping(theirs, n, group, target)
                    ids.append(_still(theirs, found, group, target, missing[g]) if newest_first else found)
            there_are = state.ids[state.saved] if newest_first else state.ids
            mine = np.intersect1d(np.concatenate(ids), there_are, assume_unique=True)
            damaged: list[tuple[Ids, str]] = []
            for batch in self.store.read(state, mine, corrupt=damaged):
                group = theirs.groups[batch.group]
                g, target = wanted[group.name]
                targets = [rows(g, t) for t in range(len(target.tensors))]
                copied += _copy(theirs, group, batch, target, targets, missing[g] if newest_first else None)
            if damaged:
                name = theirs.name(int(damaged[0][0][0]))
                raise NoIntactCopy(
                    f"{name} has no intact copy: {damaged[0][1]}",
                    hint="nothing was changed; for an older copy, use the same number of ranks or roll back",
                )
        if copied != layout.nbytes:
            raise NoIntactCopy(
                f"only {copied} of {layout.nbytes} bytes were ever saved",
                hint="nothing was changed; use the same number of ranks or roll back",
            )


def find_parts(
    store: Store,
    *,
    but: Iterable[int] = (),
    sealed: bool = False,
    snapshot: Snapshot | None = None,
    around: bool = False,
) -> Parts | None:
    """Find the newest complete state of a store, of any set of ranks; None if the store has no complete state.

    but: shards to ignore. sealed: take the state of the newest step at which all its shards were sealed. snapshot:
    take this one.

    Raises Corruption, Unavailable.
    """
    excluded, seen, ranked = set(but), set[tuple[int, ...]](), set[int]()
    epochs = topology_epochs(store)
    if snapshot is not None:
        states = store.states(snapshot.seqs, at=snapshot.seqs)
        topology = topology_of(store, snapshot.seqs, epochs)
        return Parts(store, states, topology)
    passed_over: list[int] = []
    hidden: list[Damage] = []
    for epoch in reversed(epochs):
        topology = read_topology(store, epoch)
        shards = topology.shards
        ranked |= set(shards)
        if shards in seen or excluded & set(shards):
            continue
        seen.add(shards)
        states = store.states(shards, around=around)
        found = _whole(store, states, sealed=sealed)
        if found is not None:
            return replace(found, topology=topology, passed_over=tuple(passed_over), hidden=tuple(hidden))
        passed_over.append(epoch)
        hidden += [damage for state in states.values() for damage in state.damaged]
    # A single process may have saved a state before the job had ranks.
    if store.lane in ranked | excluded:
        return None
    found = _whole(store, store.states([store.lane], around=around), sealed=sealed)
    return None if found is None else replace(found, passed_over=tuple(passed_over), hidden=tuple(hidden))


def topology_of(store: Store, shards: Iterable[int], epochs: Iterable[int] | None = None) -> Topology | None:
    """Return the newest topology that has all these shards; None if they belong to a single process."""
    wanted = set(shards)
    for epoch in sorted(topology_epochs(store) if epochs is None else epochs, reverse=True):
        topology = read_topology(store, epoch)
        if wanted <= set(topology.shards):
            return topology
    return None


def check_fits(parts: Parts, groups: Iterable[Group], names: Iterable[str], optimizer: str) -> None:
    """Raise LayoutMismatch, naming the differences, unless the state has exactly these tensors.

    groups: one rank's wanted groups with their places, and the slots that already exist. names: names of all ranks'
    wanted groups.
    """
    there, names = parts.groups(), set(names)
    lines = []
    if optimizer != parts.optimizer:
        lines.append(f"optimizer {parts.optimizer or 'none'} -> {optimizer or 'none'}")
    buffers = {_base(name) for name, group in there.items() if group.kind == "buffer"}
    lines += [f"tensor {name!r} new" for name in sorted(names - there.keys()) if _base(name) not in buffers]
    known = names | {name for name in there if _base(name) in buffers & set(map(_base, names))}
    lines += [f"tensor {name!r} missing" for name in sorted(there.keys() - known)]
    for group in groups:
        source = there.get(_source(group, there))
        if source is not None and source.box.shape != group.box.shape:
            lines.append(f"tensor {group.name!r} resized {source.box.shape} -> {group.box.shape}")
        if source is not None and source.tensors[0].dtype != group.tensors[0].dtype:
            lines.append(f"tensor {group.name!r} has another dtype")
        slots = {} if source is None else {slot.slot: slot for slot in source.tensors}
        for t, slot in enumerate(group.tensors[1:], start=1):
            twin = slots.get(slot.slot, slot)
            if source is not None and slot.slot not in slots:
                lines.append(f"tensor {group.key(t)!r} new")
            elif len(twin.shape) != len(slot.shape) or twin.dtype != slot.dtype:
                lines.append(f"tensor {group.key(t)!r} has another form")
    if lines:
        raise LayoutMismatch(
            f"the model is not the one in {parts.store.url}: " + "; ".join(lines[:10]),
            hint="nothing was changed; build the model and optimizer of the run to resume, or use a new store",
        )


def with_slots(parts: Parts, group: Group) -> tuple[TensorSpec, ...]:
    """Return the tensors of a group without slots, and the slots that the store has for it."""
    there, parameter = parts.groups(), group.tensors[0]
    slots = there[_source(group, there)].tensors[1:]
    return (parameter, *(slot.of(parameter.shape) for slot in slots))


# -- finding -----------------------------------------------------------------------------------------------------


def _whole(store: Store, states: Mapping[int, ShardState], *, sealed: bool) -> Parts | None:
    complete = all(state.layout is not None and (state.version != NEVER).all() for state in states.values())
    if not complete or not any(len(state.ids) for state in states.values()) or _retired(states):
        return None
    check_backed(store, states.values())
    for one in sealed_sets(states.values()) if sealed else ():
        with contextlib.suppress(Corruption):  # collected or damaged: try the next older one
            return Parts(store, store.states(one.seqs, at=one.seqs))
    return None if sealed else Parts(store, states)


def _retired(states: Mapping[int, ShardState]) -> bool:
    """Return whether some shards have released members, so that the state is no longer complete."""
    written = [state for state in states.values() if state.layout is not None]
    return any(len(state.ids) != state.layout.partitions for state in written if state.layout is not None)


# -- names -------------------------------------------------------------------------------------------------------

_OF_RANK = re.compile(r"(.+)@[0-9]+", re.DOTALL)


def _base(name: str) -> str:
    """Return the name in the model of a tensor that only one rank has."""
    match = _OF_RANK.fullmatch(name)
    return match[1] if match else name


def _source(group: Group, there: Mapping[str, Group]) -> str:
    """Return the name of the stored group from which a group takes its values.

    How the model is wrapped decides whether buffers, such as a batch norm's statistics, are private to each rank or
    shared. If the buffer of the same name is missing, another rank's is used.
    """
    if group.name in there or group.kind != "buffer":
        return group.name
    base = _base(group.name)
    return min((name for name in there if _base(name) == base), default=group.name, key=lambda n: (len(n), n))


# -- boxes -------------------------------------------------------------------------------------------------------

_NONE = np.empty(0, dtype=np.int64)


def _overlap(ours: Group, theirs: Group) -> tuple[tuple[int, int], ...] | None:
    """Return the common box as first and last + 1 of the whole tensor, per dimension; None without an overlap."""
    box = []
    for ours_at, ours_size, theirs_at, theirs_size in zip(
        ours.box.offset, ours.tensors[0].shape, theirs.box.offset, theirs.tensors[0].shape, strict=True
    ):
        start, stop = max(ours_at, theirs_at), min(ours_at + ours_size, theirs_at + theirs_size)
        if start >= stop:
            return None
        box.append((start, stop))
    return tuple(box)


def _overlapping(layout: Layout, g: int, theirs: Group, ours: Group) -> Ids:
    """Return the partitions of group `g` that overlap `ours`: int64, ascending."""
    box = _overlap(ours, theirs)
    if box is None:
        return _NONE
    first = int(layout.base[g])
    if not box:  # a 0-dim tensor
        return np.arange(first, int(layout.base[g + 1]))
    start, stop = (row - theirs.box.offset[0] for row in box[0])
    step = theirs.rows_per_partition
    return np.arange(first + start // step, first - (-stop // step))


def _still(layout: Layout, ids: Ids, theirs: Group, ours: Group, missing: NDArray[np.bool_]) -> Ids:
    """Return the partitions of `ids` that have rows of `ours` marked as missing: bool of shape (rows,)."""
    if not missing.any() or not ours.tensors[0].shape:
        return ids if missing.any() else _NONE
    shift = theirs.box.offset[0] - ours.box.offset[0]
    starts, stops = layout.row_ranges(ids)
    ahead = np.concatenate([[0], np.cumsum(missing)])
    first, last = (np.clip(at + shift, 0, len(missing)) for at in (starts, stops))
    return ids[ahead[last] > ahead[first]]


def _copy(
    layout: Layout,
    theirs: Group,
    batch: Batch,
    ours: Group,
    targets: list[NDArray[np.uint8]],
    missing: NDArray[np.bool_] | None,
) -> int:
    """Copy the overlap of a batch into `targets`; return its bytes.

    missing: if not None, rows of `ours` to copy, bool of shape (rows,). Copied rows are unmarked.
    """
    box = _overlap(ours, theirs)
    assert box is not None, "only partitions that overlap are read"
    starts, stops = layout.row_ranges(batch.ids)
    if not box:
        for data, target in zip(batch.tensors, targets, strict=True):
            target[...] = data
        if missing is not None:
            missing[:] = False
        return ours.nbytes
    picked = take_rows(starts, stops)
    rows = np.arange(picked.start, picked.stop) if isinstance(picked, slice) else picked
    rows += theirs.box.offset[0]
    good = (rows >= box[0][0]) & (rows < box[0][1])
    if missing is not None:
        good[good] = missing[rows[good] - ours.box.offset[0]]
    # Never negative: the first row of the box is one of ours.
    at = rows[good] - ours.box.offset[0]
    source_columns = _columns(box, theirs.box)
    target_columns = _columns(box, ours.box)
    copied = 0
    for t, (data, target) in enumerate(zip(batch.tensors, targets, strict=True)):
        beyond = len(theirs.tensors[t].shape) - 1  # 0 means one value per row
        source: tuple[Any, ...] = (good, *source_columns[:beyond])
        goal: tuple[Any, ...] = (at, *target_columns[:beyond])
        piece = _values(data, theirs.tensors[t])[source]
        _values(target, ours.tensors[t])[goal] = piece
        copied += piece.nbytes
    if missing is not None:
        missing[at] = False
    return copied


def _columns(box: tuple[tuple[int, int], ...], place: Place) -> tuple[slice, ...]:
    return tuple(slice(a - at, b - at) for (a, b), at in zip(box[1:], place.offset[1:], strict=True))


def _values(data: NDArray[np.uint8], spec: TensorSpec) -> NDArray[Any]:
    """View rows of bytes as opaque values of the dtype's size: shape (rows, *shape[1:])."""
    return data.reshape(-1).view(f"V{DTYPES[spec.dtype]}").reshape(len(data), *spec.shape[1:])
