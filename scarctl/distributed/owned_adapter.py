"""Restrict an adapter to the rows that this rank owns, and send restored rows to the ranks that hold copies of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import is_
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import distributed as dist

from scarctl.adapter import Adapter, StateGroup, touched_rows_of, watch_of
from scarctl.checkpoint.live_state import is_placeholder
from scarctl.distributed.ownership import Division, Holding
from scarctl.state.layout import Group, Layout, TensorSpec, build_layout
from scarctl.state.torch_dtypes import name_of

BUCKET_BYTES = 32 << 20
"""Most bytes that are sent at once."""

Slots: TypeAlias = Mapping[str, Sequence[TensorSpec]]
Broadcast: TypeAlias = Callable[[torch.Tensor, int, tuple[int, ...]], None]


def holdings_of(groups: Iterable[StateGroup]) -> list[Holding]:
    """Return the holdings of a rank with these groups. Raises UsageError for a dtype that cannot be stored."""
    return [
        Holding(
            group.name,
            group.kind,
            group.role,
            name_of(group.tensors[""].dtype, group.name),
            tuple(group.tensors[""].shape),
            group.place,
            group.scope,
        )
        for group in groups
    ]


def group_of(group: StateGroup) -> Group:
    """Return the group with the slots that exist."""
    specs = [
        TensorSpec(slot, name_of(tensor.dtype, group.name), tuple(tensor.shape))
        for slot, tensor in group.tensors.items()
        if not (slot and is_placeholder(tensor))
    ]
    return Group(group.name, group.kind, 1, tuple(specs), group.place)


def slots_of(layouts: Iterable[Layout]) -> dict[str, tuple[TensorSpec, ...]]:
    """Return the slots of every tensor in the layouts of all shards, by stored name. Only their dtypes are exact."""
    found: dict[str, tuple[TensorSpec, ...]] = {}
    for layout in layouts:
        for group in layout.groups:
            if len(group.tensors) >= len(found.get(group.name, ())):
                found[group.name] = group.tensors[1:]
    return found


class OwnedAdapter:
    """The rows of another adapter's groups that this rank owns, under their stored names.

    The tensors are views: writing into them changes the model.
    """

    def __init__(self, adapter: Adapter, division: Division, rank: int, groups: Sequence[StateGroup]) -> None:
        """Prepare with a division computed from the adapter's current `groups`, which may gain slots later."""
        self._adapter = adapter
        self._owned = division.owned[rank]
        self._stored = dict(zip((group.name for group in groups), division.names[rank], strict=True))
        self._original = [groups[owned.group].name for owned in self._owned]
        self._buffers = {
            name: owned.name
            for name, owned in zip(self._original, self._owned, strict=True)
            if groups[owned.group].kind == "buffer"
        }
        self._slots: Slots = {}
        self._kept: list[StateGroup] = []
        """The adapter's groups from which `_made` was made, if the adapter keeps them, too."""
        self._made: list[StateGroup] = []
        self._first: Callable[[], torch.Tensor | None] = _gone
        """A weak reference to the first tensor of the adapter's newest groups."""
        self.whole = adapter
        self.elsewhere = {part.name for parts in division.owned for part in parts}
        """Stored names of the groups of all ranks."""
        touched = touched_rows_of(adapter)
        if touched is not None:
            self.touched_rows = lambda *, dense: self._cut(touched(dense=dense))
        self.watch = partial(watch_of, adapter)

    @property
    def automatic(self) -> bool:
        return self._adapter.automatic

    @property
    def extras_per_rank(self) -> bool:
        return self._adapter.extras_per_rank

    def mix(self, theirs: Any, own: Any) -> Any:
        return self._adapter.mix(theirs, own)

    @property
    def optimizer(self) -> str:
        return self._adapter.optimizer

    def groups(self) -> list[StateGroup]:
        """Return the owned rows of every group that has any: the same objects while the whole groups are the same."""
        whole = self._adapter.groups()
        if len(whole) == len(self._kept) and all(map(is_, whole, self._kept)):
            return list(self._made)
        found = {group.name: group for group in whole}
        groups = []
        for name, owned in zip(self._original, self._owned, strict=True):
            group = found.get(name)
            # A group that has lost rows is left out. The comparison with the layout then reports it.
            if group is not None and owned.stop <= _rows(group.tensors[""]):
                tensors = {slot: _narrowed(t, owned.start, owned.stop) for slot, t in group.tensors.items()}
                part = replace(group, name=owned.name, tensors=tensors, place=owned.place)
                groups.append(replace(part, role="own", scope=""))
        first = whole[0].tensors[""] if whole else None
        # Before the first step an adapter keeps no groups, so that the model may move. Then none are kept here either.
        keeps = first is not None and self._first() is first
        self._kept, self._made = (whole, groups) if keeps else ([], [])
        self._first = ref(first) if first is not None else _gone
        return list(groups)

    @property
    def known(self) -> Sequence[StateGroup]:
        """The whole adapter's groups in the newest call of `groups`; () if the adapter may make others."""
        return self._kept

    def unowned(self) -> list[str]:
        """Return the names of the adapter's groups that were added after the division: no rank saves them."""
        return [group.name for group in self._adapter.groups() if group.name not in self._stored]

    def _cut(self, touched: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the adapter's touched rows that this rank owns."""
        found = {}
        for name, owned in zip(self._original, self._owned, strict=True):
            rows = touched.get(name)
            if rows is None:
                continue
            if rows.dtype == torch.bool:
                found[owned.name] = rows[owned.start : owned.stop]
            else:
                found[owned.name] = rows[(rows >= owned.start) & (rows < owned.stop)] - owned.start
        return found

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers that this rank owns. They are never divided."""
        found = self._adapter.buffers()
        return {stored: found[name] for name, stored in self._buffers.items() if name in found}

    def capture(self) -> Any:
        return self._adapter.capture()

    def restore(self, state: Any) -> None:
        self._adapter.restore(state)

    def learn_slots(self, slots: Slots) -> None:
        """Keep the slots of tensors that other ranks own, from `slots_of`, for `create_slots`."""
        self._slots = dict(slots)

    def create_slots(self, layout: Layout) -> Callable[[], None]:
        """Create the slots of all rows that this rank holds, those of other owners included; see `learn_slots`."""
        slots = {**self._slots, **slots_of([layout])}
        wanted = []
        for group in self._adapter.groups():
            # A replica has no slots: another rank's optimizer updates it.
            if group.role != "replica" and group.kind == "parameter" and group.name in self._stored:
                shape = tuple(group.tensors[""].shape)
                own = TensorSpec("", name_of(group.tensors[""].dtype, group.name), shape)
                more = (slot.of(shape) for slot in slots.get(self._stored[group.name], ()))
                wanted.append((group.name, group.kind, (own, *more), group.place))
        return self._adapter.create_slots(build_layout(wanted, by_layer=True))

    def install(self, before: Callable[[], None], after: Callable[[], None] | None) -> Callable[[], None]:
        return self._adapter.install(before, after)


def spread(division: Division, rank: int, groups: Sequence[StateGroup], broadcast: Broadcast) -> int:
    """Send the rows that this rank owns to all ranks that hold copies, and receive theirs. Every rank has to call it.

    groups: groups of the whole adapter, parallel to the rank's holdings, with all slots that ranks share.
    broadcast: called as (buffer, owner, ranks) on these `ranks` only, in the same order on all of them. The buffer is
        uint8 of shape (at most `BUCKET_BYTES`,), on the CPU. The owner has filled it, the others receive it.

    Returns the bytes that were sent or received.
    """
    streams: dict[tuple[int, tuple[int, ...]], list[torch.Tensor]] = {}
    for copy in division.copies:
        if rank not in copy.holders.groups:
            continue
        tensors = groups[copy.holders.groups[rank]].tensors
        ranks = tuple(copy.holders.groups)
        streams.setdefault((copy.owner, ranks), []).append(_narrowed(tensors[""], copy.start, copy.stop))
        sharing = copy.holders.sharing
        if rank in sharing and len(sharing) > 1:
            slots = [_narrowed(t, copy.start, copy.stop) for slot, t in sorted(tensors.items()) if slot]
            streams.setdefault((copy.owner, sharing), []).extend(slots)
    total = 0
    for (owner, ranks), parts in sorted(streams.items(), key=lambda stream: stream[0]):
        for bucket in _buckets(parts):
            total += _send(bucket, owner, ranks, rank, broadcast)
    return total


def broadcast_over(group: dist.ProcessGroup) -> Broadcast:
    """Return a `broadcast` for `spread` over a gloo group with the ranks of the division."""
    size = dist.get_world_size(group)

    def broadcast(buffer: torch.Tensor, owner: int, ranks: tuple[int, ...]) -> None:
        if len(ranks) == size:
            dist.broadcast(buffer, dist.get_global_rank(group, owner), group=group)
        elif dist.get_rank(group) == owner:
            for other in ranks:
                if other != owner:
                    dist.send(buffer, dist.get_global_rank(group, other), group=group)
        else:
            dist.recv(buffer, dist.get_global_rank(group, owner), group=group)

    return broadcast


def _gone() -> None:
    """Return what a weak reference to a deleted object returns."""


def _rows(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def _narrowed(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return tensor.narrow(0, start, stop - start) if tensor.dim() else tensor


def _buckets(parts: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the parts, cut at rows, in lists of at most BUCKET_BYTES or one row. All ranks get the same lists."""
    bucket: list[torch.Tensor] = []
    room = BUCKET_BYTES
    for part in parts:
        rows, row = _rows(part), part.nbytes // max(1, _rows(part))
        start = 0
        while start < rows and row:
            if bucket and row > room:
                yield bucket
                bucket, room = [], BUCKET_BYTES
            count = min(rows - start, max(1, room // row))
            bucket.append(_narrowed(part, start, start + count))
            room -= count * row
            start += count
    if bucket:
        yield bucket


def _send(
    bucket: list[torch.Tensor], owner: int, ranks: tuple[int, ...], rank: int, broadcast: Broadcast
) -> int:
    """Broadcast one bucket, and return its bytes."""
    sizes = [part.nbytes for part in bucket]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8)
    pieces = list(zip(bucket, torch.split(buffer, sizes), strict=True))
    if rank == owner:
        for part, piece in pieces:
            piece.copy_(part.contiguous().reshape(-1).view(torch.uint8))
    broadcast(buffer, owner, ranks)
    if rank != owner:
        with torch.no_grad():
            for part, piece in pieces:
                # A slot that the optimizer has not created yet is a view of one value.
                if 0 not in part.stride() or part.numel() == 1:
                    part.copy_(piece.clone().view(part.dtype).view(part.shape))
    return buffer.numel()
