"""Fill a new arena after a resume, next to the loop's first pass, with what was read into the live tensors.

New memory is slow, and a resume from the store needs as much for the arena as for the state. So it reads the copies
where the live tensors want them, verifies all, and returns. The copy thread then writes the live values into the arena.
Training waits for it before its first step, as for any copy.

Until the arena is full it has no copy at all. So a process that dies before has lost nothing: the store has what it
had. A copy counts only if its bytes in the arena have the store's checksum. What the loop has written meanwhile does
not: a regular checkpoint then saves the whole state.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.checkpoint.live_state import LiveState
from scarctl.checkpoint.loading import NewSlots, bytes_of, is_plain
from scarctl.recovery.memory import checksums, pieces
from scarctl.recovery.plan import Plan
from scarctl.state.layout import Layout, rows_of
from scarctl.state.torch_dtypes import torch_of
from scarctl.state.version import NEVER, epoch_of, pack, step_of
from scarctl.util.arrays import Bytes, Ids

_WORTH = 64 << 20
"""Bytes of a state from which on a resume returns before the arena is full."""
_ALIGNED = 64


def may_wait(live: LiveState) -> bool:
    """Return whether the arena may be filled later: it is new, and all live tensors are plain memory of the host."""
    return (
        live.arena.is_filling
        and live.layout.nbytes >= _WORTH
        and not live.replaces
        and all(is_plain(tensor) for group in live.tensors for tensor in group)
    )


class Staged:
    """A sink for the store's copies: slots that a resume has made, and buffers for all other tensors."""

    def __init__(self, layout: Layout, new: NewSlots) -> None:
        self.arena: Arena | None = None
        self.complete = False
        """Whether it has every copy that was planned, and no other."""
        self._layout = layout
        self._rows = dict(new.rows)
        self.tensors: list[list[torch.Tensor | None]] = []
        """The buffers by group and tensor, in the shape of the live tensor; None for slots, which have their values."""
        others = [
            (g, t, spec)
            for g, group in enumerate(layout.groups)
            for t, spec in enumerate(group.tensors)
            if (g, t) not in new.rows
        ]
        sizes = [-(-spec.nbytes // _ALIGNED) * _ALIGNED for *_, spec in others]
        # Not numpy's: it asks for huge pages, for which the system may first move memory.
        memory, at = torch.empty(sum(sizes), dtype=torch.uint8), 0
        self.tensors = [[None] * len(group.tensors) for group in layout.groups]
        for (g, t, spec), size in zip(others, sizes, strict=True):
            flat = memory[at : at + spec.nbytes]
            self._rows[g, t] = flat.numpy().reshape(spec.rows, spec.row_bytes)
            self.tensors[g][t] = flat.view(torch_of(spec.dtype)).view(spec.shape)
            at += size

    def room(self, group: int, ids: Ids) -> Sequence[Bytes]:
        """Return the rows of adjacent partitions, by tensor."""
        rows = rows_of(self._layout, group, ids)
        return [
            self._rows[group, t][rows].reshape(-1) for t in range(len(self._layout.groups[group].tensors))
        ]

    def put(self, group: int, ids: Ids, versions: Ids, tensors: Sequence[Bytes]) -> None:
        """Write the rows that were not read into `room`."""
        rows = rows_of(self._layout, group, ids)
        for t, data in enumerate(tensors):
            target = self._rows[group, t]
            if not np.may_share_memory(target, data):
                target[rows] = data

    def source(self, live: LiveState) -> list[list[torch.Tensor]]:
        """Return what to fill the arena from, by group and tensor, plain memory in the shapes of the live tensors.

        Those are aliases of the live tensors, but copies of the buffers, which the next forward pass may change.
        """
        buffers = set(live.buffers)
        return [
            [
                staged.clone() if g in buffers and staged is not None else tensor.detach()
                for tensor, staged in zip(live.tensors[g], self.tensors[g], strict=True)
            ]
            for g in range(len(self._layout.groups))
        ]


class Filling:
    """Fills one arena, which is new, and whose rows have no space yet."""

    def __init__(self, arena: Arena) -> None:
        self.lacks_copies = False
        """The arena lacks copies that the store has: a regular checkpoint has to save the whole state."""
        self._arena = arena
        self._later: tuple[Plan, list[list[torch.Tensor]], int] | None = None

    def later(self, plan: Plan, source: list[list[torch.Tensor]], step: int) -> None:
        """Have `run` write the copies of `plan`, all of them the store's, and not encoded.

        source: see `Staged.source`. step: the step from which the run continues.
        """
        # So that the store is not reported as empty until then. A copy counts only once it has a version.
        self._arena.acknowledge(plan.ids, plan.version, np.zeros(plan.ids.size, np.int64))
        self._later = plan, source, step

    @property
    def since(self) -> int | None:
        """The step of the resume whose copies the arena lacks, all of which the store has; None without one."""
        return None if self._later is None else self._later[2]

    def run(self) -> None:
        """Reserve the arena's space, and write the copies. Does nothing the second time.

        Called in the copy thread, or while that waits. Raises Unavailable (`kind` "arena-full"): then the next call
        tries again, and nothing may be written to the arena before.
        """
        if not self._arena.is_filling:
            return
        self._arena.reserve_rows()
        later, self._later = self._later, None
        if later is not None:
            plan, source, step = later
            self.lacks_copies = True
            self.lacks_copies = not self._write(plan, source)
            age_after(self._arena, step)
        self._arena.end_filling()

    def _write(self, plan: Plan, source: list[list[torch.Tensor]]) -> bool:
        """Return whether all copies were written: the bytes of a partition may no longer be those of the store."""
        arena, wanted = self._arena, np.zeros(plan.layout.partitions, np.uint64)
        wanted[plan.state.ids] = plan.state.checksum
        right: NDArray[np.bool_] = np.zeros(plan.ids.size, dtype=bool)
        begun = arena.begin_moment(flush=True)
        assert begun is not None
        slot, moment = begun
        slot.begin(plan.ids)
        for g, part in pieces(plan.layout, plan.ids):
            ids = plan.ids[part]
            rows = rows_of(plan.layout, g, ids)
            for t, spec in enumerate(plan.layout.groups[g].tensors):
                # Not looked up earlier: `share_memory` moves a tensor's memory, and frees the old one.
                there = bytes_of(source[g][t]).reshape(spec.rows, spec.row_bytes)
                arena.put_rows(slot, g, t, rows, there[rows])
            # Read from the arena: a write to the live tensors between two reads would not show.
            right[part] = checksums(slot, g, ids) == wanted[ids]
        ids, versions = plan.ids[right], plan.version[right]
        slot.end(ids, versions, moment)
        whole = plan.whole if plan.label.of_one and right.all() else ""
        newest = int(plan.version.max()) if plan.ids.size else pack(max(arena.epoch, 1), 0)
        head = newest if plan.step is None else pack(epoch_of(newest), plan.step)
        # All copies appear last: if the process dies before, the store has its state as before.
        arena.flip(slot, moment, head, whole)
        arena.acknowledge(ids, versions, slot.moments[ids])
        if right.all():
            arena.keep(moment)
        if whole:
            # The store has all of this commit, which may be of a later step than any of its copies.
            arena.seal(head)
        return bool(right.all())


def age_after(arena: Arena, step: int) -> None:
    """Relabel copies of later steps than `step`, from which the run continues, with the step before it.

    So they never count as of one step, and the next checkpoint is newer than they are.
    """
    slot = arena.slot
    newest = slot.newest()
    ahead = np.flatnonzero(step_of(newest) > step)
    if ahead.size:
        version = pack(arena.epoch, max(0, step - 1))
        slot.version[:] = newest
        slot.version[ahead] = version
        slot.stamp(slot.moment, version, "")
        arena.seal(NEVER)
        # The store has them as of a step that is given up.
        arena.acknowledge(ahead, arena.durable[ahead], np.zeros(ahead.size, np.int64))
        arena.keep(0)
