"""Compare and copy between the live tensors of a training process and their last saved copies in the arena.

`LiveState` is the only place where bytes move between the two: distances compare them with the arena's current slot,
`save` copies live rows into the other slot, `load` copies them back from either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import pairwise
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.arena.slot import Slot
from scarctl.checkpoint.batched import distances_of_groups
from scarctl.checkpoint.distance import Norm, Scratch, bits, changed, distances_of, finite
from scarctl.checkpoint.loading import LARGE, NewSlots, Piece, copy_all, pieces_of, views_of
from scarctl.checkpoint.partly import estimates
from scarctl.checkpoint.row_copies import copy_rows, equal, is_gpu, wait_for
from scarctl.state.layout import Layout
from scarctl.util.arrays import Ids, adjacent, take_rows

_ATTEMPTS = 3
"""Attempts to copy a piece before it is left without a copy."""
_BATCH_BYTES = 8 << 20
_GPU_BATCH_BYTES = 32 << 20
"""The same for a state on a GPU, which copies this in about the time in which the host copies the other."""
_UNEVEN = 8
"""Share, as its reciprocal, of a group's partitions that may not have moved in a part of their values."""
_GATHER = 3
"""Gathering and comparing one partition takes about as long as comparing this many in place."""

_Views: TypeAlias = tuple[list[torch.Tensor], list[torch.Tensor]]
_Run: TypeAlias = tuple[int, Ids, Ids, Ids, _Views | None]
"""Group, partitions, first rows, last rows + 1; and the same rows of the arena's tensors and the live ones."""


class LiveState:
    """Tensors of a model and its optimizer, parallel to `layout.groups[g].tensors[t]`, and their arena.

    A tensor may be on any device and have any strides; its shape and dtype are those of the layout.
    """

    def __init__(
        self,
        layout: Layout,
        tensors: Sequence[Sequence[torch.Tensor]],
        arena: Arena,
        frozen: Set[int] = frozenset(),
        writable: Callable[[str], Mapping[str, torch.Tensor]] | None = None,
    ) -> None:
        """Take tensors and arena.

        frozen: numbers of groups that training does not change; see `StateGroup`.
        writable: returns what to write into instead of a group's tensors, by slot; see `ReplacesArrays`.
        """
        self.layout = layout
        self.frozen = frozen
        self.tensors = [list(group) for group in tensors]
        self.arena = arena
        self.new_slots: NewSlots | None = None
        """During a resume, the slots that it has made."""
        self._writable = writable
        self._views = [views_of(slot) for slot in arena.slots]
        self._runs: dict[int, tuple[list[Any], list[_Run]]] = {}
        """By number of the slot to write to."""

    def with_tensors(
        self, tensors: Mapping[int, Sequence[torch.Tensor]], frozen: Set[int] | None = None
    ) -> LiveState:
        """Return this state with other tensors for some groups, by number: newer ones, or private copies."""
        twin = object.__new__(LiveState)
        twin.new_slots, twin._runs = None, {}
        twin.frozen = self.frozen if frozen is None else frozen
        twin.layout, twin.arena, twin._views = self.layout, self.arena, self._views
        twin._writable = self._writable
        twin.tensors = [list(tensors.get(g, group)) for g, group in enumerate(self.tensors)]
        return twin

    @property
    def _saved(self) -> list[list[torch.Tensor]]:
        """The tensors of the arena's current slot."""
        return self._views[self.arena.current]

    def distances(self, norm: Norm = "l2") -> NDArray[np.float64]:
        """Return the distance of every partition from its copy in the arena: float64 of shape (layout.partitions,).

        A distance is NaN or Inf if live values that are not finite differ from the saved ones.
        """
        return self.distances_at(np.arange(self.layout.partitions), norm)

    def distances_at(
        self, ids: Ids, norm: Norm = "l2", scratch: Scratch | None = None, slot: Slot | None = None
    ) -> NDArray[np.float64]:
        """Return the distances of the partitions `ids` (ascending): float64 of the shape of `ids`. See `distances`.

        slot: the slot with the copies; None: the current one.
        """
        if slot is not None and slot is not self.arena.slot:
            of_slot, saved = np.empty(ids.size), self._views[slot.number]
            for g, part in self.parts(ids):
                mine = ids[part] - int(self.layout.base[g])
                group = self.layout.groups[g]
                of_slot[part] = distances_of(group, self.tensors[g], saved[g], mine, norm, Scratch())
            return of_slot
        result, scratch = np.empty(ids.size), scratch or Scratch()
        whole: dict[int, slice] = {}
        for g, part in self.parts(ids):
            group, mine = self.layout.groups[g], ids[part]
            adjacent = mine[-1] - mine[0] == mine.size - 1
            if mine.size == group.partitions or (not adjacent and mine.size * _GATHER >= group.partitions):
                whole[g] = part
            else:
                result[part] = self.distances_of(g, mine, norm, scratch)
        found = self.groups_distances(list(whole), norm, scratch)
        for (g, part), every in zip(whole.items(), found, strict=True):
            result[part] = every[ids[part] - self.layout.base[g]]
        return result

    def distances_of(
        self, g: int, ids: Ids, norm: Norm = "l2", scratch: Scratch | None = None
    ) -> NDArray[np.float64]:
        """Return the distances of the partitions `ids` (ascending) of group `g`: float64 of the shape of `ids`."""
        mine = ids - int(self.layout.base[g])
        return distances_of(self.layout.groups[g], self.tensors[g], self._saved[g], mine, norm, scratch)

    def equal(self, ids: Ids) -> bool:
        """Return whether the parameters of `ids` (ascending) equal their copies. NaN never does. False if unknown.

        Faster than distances, for a few partitions.
        """
        there, here = [], []
        for g, part in self.parts(ids):
            live, saved = self.tensors[g][0], self._saved[g][0]
            starts, stops = self.layout.row_ranges(ids[part])
            if not live.dim() or not (live.device.type == "cpu" or is_gpu(live.device)):
                return False
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
                if is_gpu(live.device):
                    there.append(live[start:stop])
                    here.append(saved[start:stop])
                elif not torch.equal(live[start:stop], saved[start:stop]):
                    return False
        return not there or equal(there, here)

    def not_finite(self, ids: Ids) -> Ids:
        """Return the `ids` (ascending) with a live value that is not finite although the saved one is."""
        bad = []
        for g, part in self.parts(ids):
            group, mine = self.layout.groups[g], ids[part]
            count = max(1, _BATCH_BYTES // max(1, group.rows_per_partition * group.row_bytes))
            for first in range(0, mine.size, count):
                some = mine[first : first + count]
                if self._is_left(g, some):
                    bad += [one for one in np.split(some, some.size) if self._is_left(g, one)]
        return np.concatenate([ids[:0], *bad])

    def _is_left(self, g: int, ids: Ids) -> bool:
        rows = take_rows(*self.layout.row_ranges(ids))
        return any(_left(*pair, rows) for pair in zip(self.tensors[g], self._saved[g], strict=True))

    def finite(self, g: int, ids: Ids) -> NDArray[np.bool_]:
        """Return which of `ids` (ascending) of group `g` have a finite parameter. See `distance.finite`."""
        return finite(self.layout.groups[g], self.tensors[g][0], ids - int(self.layout.base[g]))

    def groups_distances(
        self, groups: Sequence[int], norm: Norm, scratch: Scratch
    ) -> list[NDArray[np.float64]]:
        """Return the distances of all partitions of each of these groups: arrays parallel to `groups`."""
        return distances_of_groups(
            [self.layout.groups[g] for g in groups],
            [self.tensors[g] for g in groups],
            [self._saved[g] for g in groups],
            norm,
            scratch,
        )

    def estimates(self, g: int, look: int, scratch: Scratch) -> NDArray[np.float64] | None:
        """Return distances of group `g`, estimated from a part of its values: see `scarctl.checkpoint.partly`.

        Partitions of which that part has not changed are compared completely. None if all of the group, or much of it,
        has to be.
        """
        group, live, saved = self.layout.groups[g], self.tensors[g][0], self._saved[g][0]
        found = estimates(group, live.detach(), saved, look, scratch)
        if found is not None:
            # Not finite, or as if it had not moved: all of its values decide.
            rest = np.flatnonzero(~(np.isfinite(found) & (found > 0)))
            if rest.size > 1 + found.size // _UNEVEN:
                return None
            found[rest] = self.distances_of(g, int(self.layout.base[g]) + rest, scratch=scratch)
        return found

    def changed(self, slot: Slot | None = None) -> NDArray[np.bool_]:
        """Return which partitions differ from their copy in any byte: bool of shape (layout.partitions,).

        slot: the slot with the copies; None: the current one. All differ while the arena is not filled: its rows may
        have no space, and are not read.
        """
        result = np.ones(self.layout.partitions, dtype=bool)
        if self.arena.is_filling:
            return result
        saved = self._views[(slot or self.arena.slot).number]
        for g, group in enumerate(self.layout.groups):
            result[self._span(g)] = changed(group, self.tensors[g], saved[g])
        return result

    def changed_of(self, g: int) -> NDArray[np.bool_]:
        """Return which partitions of group `g` differ from their copy in any byte: bool (partitions of it,)."""
        return changed(self.layout.groups[g], self.tensors[g], self._saved[g])

    def changed_at(self, g: int, ids: Ids) -> NDArray[np.bool_]:
        """Return which of the partitions `ids` (ascending) of group `g` differ from their copy in any byte."""
        result = np.zeros(ids.size, dtype=bool)
        if not ids.size:
            return result
        starts, stops = self.layout.row_ranges(ids)
        firsts, rows = np.cumsum(stops - starts) - (stops - starts), take_rows(starts, stops)
        for live, saved in zip(self.tensors[g], self._saved[g], strict=True):
            now, then = bits(_rows(live.detach(), rows)), bits(_rows(saved, rows))
            differs = (now != then.to(now.device)).any(dim=1).cpu().numpy()
            result |= np.logical_or.reduceat(differs, firsts)
        return result

    def save(self, ids: Ids, slot: Slot, version: int, moment: int, unread: Set[int] = frozenset()) -> Ids:
        """Copy the partitions `ids` (ascending) into a slot of the arena, as new at `version` and `moment`.

        Partitions that another thread keeps writing to meanwhile, as counted by torch, are left without a copy.
        unread: groups whose parameters may have values that are not finite. Returns the partitions that have such
        values, ascending: they are not copied.
        """
        gpu, into = any(map(is_gpu, self.devices)), self._views[slot.number]
        left: list[Ids] = []
        if ids.size == self.layout.partitions and all(device.type == "cpu" for device in self.devices):
            pieces: Iterable[_Run] = self._all_runs(slot.number)
        else:
            pieces = self._batches(ids, _GPU_BATCH_BYTES if gpu else _BATCH_BYTES)
        for piece in pieces:
            for g, batch, starts, stops, views in self._finite(piece, unread, left):
                slot.begin(batch)
                for _ in range(_ATTEMPTS):
                    before = self.counters(g)
                    if views:
                        torch._foreach_copy_(*views)
                    else:
                        for saved, live in zip(into[g], self.tensors[g], strict=True):
                            copy_rows(saved, live, starts, stops, counted=False)
                    if gpu:
                        wait_for(self.devices)
                    if self.counters(g) == before:
                        slot.end(batch, version, moment)
                        break
        return np.concatenate([ids[:0], *left])

    def _finite(self, piece: _Run, unread: Set[int], left: list[Ids]) -> Iterable[_Run]:
        """Return a piece without what is not finite: that is added to `left`."""
        g, batch, _, _, views = piece
        # A value that is not finite makes the sum so.
        if g not in unread or (views and torch.isfinite(views[1][0].sum())):
            return (piece,)
        good = self.finite(g, batch)
        if good.all():
            return (piece,)
        # A sum may overflow, and a value that is not finite may equal its copy.
        good[~good] = np.isfinite(self.distances_of(g, batch[~good]))
        left.append(batch[~good])
        return self._batches(batch[good], _BATCH_BYTES)

    def _all_runs(self, slot: int) -> Sequence[_Run]:
        """Return all partitions in pieces. They are kept, because making them takes half as long as copying 10 MiB."""
        memory = [
            (tensor.data_ptr(), tensor.stride()) for tensor in self._flat
        ]  # a tensor may get another one
        kept = self._runs.get(slot)
        if kept is None or kept[0] != memory:
            found: list[_Run] = []
            for g, batch, starts, stops, _ in self._batches(np.arange(self.layout.partitions), _BATCH_BYTES):
                rows = slice(int(starts[0]), int(stops[0]))
                pairs = [
                    (saved[rows], live[rows].detach()) if saved.dim() else (saved, live.detach())
                    for saved, live in zip(self._views[slot][g], self.tensors[g], strict=True)
                ]
                views = [saved for saved, _ in pairs], [live for _, live in pairs]
                found.append((g, batch, starts, stops, views))
            kept = self._runs[slot] = memory, found
        return kept[1]

    @functools.cached_property
    def parameters(self) -> NDArray[np.bool_]:
        """Which groups are parameters: bool (groups,)."""
        return np.array([group.kind == "parameter" for group in self.layout.groups], dtype=bool)

    @functools.cached_property
    def buffers(self) -> Sequence[int]:
        """Numbers of the groups that a forward pass may change."""
        return [g for g, group in enumerate(self.layout.groups) if group.kind == "buffer"]

    @functools.cached_property
    def _flat(self) -> list[torch.Tensor]:
        return [tensor for group in self.tensors for tensor in group]

    @functools.cached_property
    def devices(self) -> Set[torch.device]:
        """The devices of all tensors."""
        return set(map(attrgetter("device"), self._flat))

    def all_counters(self) -> list[int]:
        """Return the `counters` of all groups in one list, at once: there may be thousands of tensors."""
        return list(map(attrgetter("_version"), self._flat))

    def written(self, before: list[int]) -> Set[int]:
        """Return the groups that were written to in place since `all_counters` was `before`."""
        now = self.all_counters()
        if now == before:
            return frozenset()
        ends = np.cumsum([len(group) for group in self.tensors])
        other = np.flatnonzero(np.array(now) != np.array(before))
        return set(np.searchsorted(ends, other, side="right").tolist())

    def counters(self, g: int) -> list[int]:
        """Return torch's counts of in-place writes to each tensor of group `g`."""
        return [t._version for t in self.tensors[g]]

    def mark(self, g: int) -> list[tuple[int, int]]:
        """Return a mark that stays equal while torch counts no write to group `g`."""
        return [(t.data_ptr(), t._version) for t in self.tensors[g]]

    @property
    def replaces(self) -> bool:
        """Whether the live tensors are immutable, and replaced instead of written to."""
        return self._writable is not None

    def load(
        self,
        ids: Ids,
        source: Sequence[Sequence[torch.Tensor | None]] | None = None,
        slot: Slot | None = None,
    ) -> None:
        """Copy the partitions `ids` (ascending) from the arena into the live tensors.

        source: tensors to copy from instead, by group and tensor; None where the live one has its values.
        slot: the slot to copy from; None: the current one.
        """
        large: list[Piece] = []
        self._make_writable(ids)
        new, slot = self.new_slots, slot or self.arena.slot
        there = None if new is None else new.have(slot)
        views = self._views[slot.number]
        with torch.no_grad():
            # Loading needs no small pieces.
            for g, batch, starts, stops, _ in self._batches(ids, limit=1 << 62):
                rows = take_rows(starts, stops)
                known = new.rows if new is not None and there is not None and there[batch].all() else ()
                of_group = zip((source or views)[g], self.tensors[g], strict=True)
                for t, (saved, live) in enumerate(of_group):
                    if saved is None or (g, t) in known or is_placeholder(live):
                        continue
                    pieces = []
                    if isinstance(rows, slice) and live.dim() and live.nbytes >= LARGE:
                        pieces = pieces_of(live[rows], saved[rows])
                    if not pieces:
                        copy_rows(live, saved, starts, stops)
                    large += pieces
            copy_all(large)
            wait_for(self.devices)

    def _make_writable(self, ids: Ids) -> None:
        """Replace the tensors of the groups of `ids` by private copies, if the live ones are immutable."""
        if self._writable is None:
            return
        for g, _ in self.parts(ids):
            copies = self._writable(self.layout.groups[g].name)
            self.tensors[g] = [copies[spec.slot] for spec in self.layout.groups[g].tensors]
        self.__dict__.pop("_flat", None)

    def parts(self, ids: Ids) -> Iterator[tuple[int, slice]]:
        """Yield the groups of the partitions `ids` (ascending), and the slice of `ids` in each."""
        if not ids.size:
            return
        first, last = np.searchsorted(self.layout.base, ids[[0, -1]], side="right") - 1
        bounds = np.searchsorted(ids, self.layout.base[first : last + 2]).tolist()
        for g, (start, stop) in enumerate(pairwise(bounds), int(first)):
            if start < stop:
                yield g, slice(start, stop)

    def _span(self, g: int) -> slice:
        return slice(int(self.layout.base[g]), int(self.layout.base[g + 1]))

    def _batches(self, ids: Ids, limit: int) -> Iterator[_Run]:
        """Yield pieces of at most about `limit` bytes, or of one partition, without views."""
        for g, part in self.parts(ids):
            group, mine = self.layout.groups[g], ids[part]
            step = max(1, limit // max(1, group.rows_per_partition * group.row_bytes))
            for first in range(0, mine.size, step):
                batch = mine[first : first + step]
                if isinstance(adjacent(batch), slice):  # one run of rows: several times faster
                    start, stop = batch[[0, -1]] - self.layout.base[g] + (0, 1)
                    runs = np.array([start, stop]) * group.rows_per_partition
                    starts, stops = runs[:1], np.minimum(runs[1:], group.rows)
                else:
                    starts, stops = self.layout.row_ranges(batch)
                yield g, batch, starts, stops, None


def is_placeholder(tensor: torch.Tensor) -> bool:
    """Return whether a tensor stands for a slot that the optimizer has not created yet (see `StateGroup`)."""
    strides = tensor.stride()
    return 0 in strides and any(
        stride == 0 and size > 1 for stride, size in zip(strides, tensor.shape, strict=True)
    )


def _left(live: torch.Tensor, saved: torch.Tensor, rows: slice | Ids) -> bool:
    """Return whether a live value of these rows is not finite although the saved one is."""
    if not live.is_floating_point() or not live.numel():
        return False
    at = torch.from_numpy(rows) if isinstance(rows, np.ndarray) else rows
    here = live.detach()[at if isinstance(at, slice) else at.to(live.device)] if live.dim() else live.detach()
    wrong = ~torch.isfinite(here.float())
    if not wrong.any():
        return False
    there = torch.isfinite((saved[at] if saved.dim() else saved).float())
    return bool((wrong.cpu() & there).any())


def _rows(tensor: torch.Tensor, rows: slice | Ids) -> torch.Tensor:
    """Return some rows of a tensor, each as one vector."""
    at = rows if isinstance(rows, slice) else torch.from_numpy(rows).to(tensor.device)
    picked = tensor[at] if tensor.dim() else tensor.reshape(1)
    return picked.reshape(picked.shape[0], -1)
