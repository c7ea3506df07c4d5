"""Measure or estimate how far every partition has moved since it was saved, to choose the partitions to save.

    exact       compares all values of the parameter with the copy (`distance`).
    overlapped  the same, in pieces, after every iteration between two checkpoints (`overlapped`). If all parameters
                together have fewer than `SMALL` bytes, or if a checkpoint may save everything, they are compared at the
                checkpoint.
    sampled     compares a few values of every partition, different ones at every checkpoint (`sampled`). Applies to
                partitions of at least `sampled.NARROW` values, `NARROW_HERE` in the host's memory.
    touched     compares the rows of embedding tables that got a gradient since the last look, and remembers the
                distances of the others (`touched`). Groups that are not tables are compared completely.
    auto        touched for tables with sparse gradients, sampled for large partitions on a GPU, overlapped otherwise.

Every chosen partition is checked before it is copied, and left out if it is not finite. Sealed checkpoints check all
partitions, with every tracker.

**Frozen groups** (`StateGroup.frozen`) that once equalled their copies count as unchanged while torch counts no write
to them. Writes through `.data` are not counted. So every checkpoint compares another one in 64 of their partitions, and
all of them if one has moved.

**Rows without a gradient may move**, by weight decay, momentum or a direct write. So every look also compares a few
hundred of them. If more than one in 64 of these has moved, the whole table is compared, as by `exact`. If fewer
moved, a later look or the next sealed checkpoint finds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.adapter import Adapter, touched_rows_of
from scarctl.checkpoint.distance import Norm, Scratch, values_of
from scarctl.checkpoint.live_state import LiveState
from scarctl.checkpoint.overlapped import Sweep
from scarctl.checkpoint.sampled import NARROW, NARROW_HERE
from scarctl.checkpoint.touched import Touches
from scarctl.config import SessionSettings
from scarctl.errors import UsageError
from scarctl.state.layout import Layout
from scarctl.util.arrays import Ids, union

_NONE = np.empty(0, dtype=np.int64)
_OTHERS = 512
"""Partitions of a table that are checked for a move without a gradient."""
_DRIFT = 1 / 64
"""Share of these that may have moved."""
_SAME = 1e-3
"""Relative difference of two distances that counts as rounding."""
_TURNS = 64
"""Looks in which every partition of a frozen group is compared once."""
SMALL = 16 << 20
"""Bytes of parameters that are compared so quickly that starting earlier is not worthwhile."""
_FEW = 1 / 4
"""Share of a table's partitions below which gathering them is faster than comparing all."""


def touched_of(
    adapter: Adapter, settings: SessionSettings, *, hooked: bool
) -> Callable[[], Mapping[str, torch.Tensor]] | None:
    """Return a function that returns the rows which the coming step changes, or None if the tracker needs none.

    hooked: whether the session hooks into the optimizers' steps. Raises UsageError if the tracker "touched" lacks hooks
    or gradients.
    """
    if settings.tracker not in ("touched", "auto"):
        return None
    rows = touched_rows_of(adapter)
    if rows is None or not hooked:
        if settings.tracker == "auto":
            return None
        raise UsageError(
            'tracker="touched" reads gradients right before an optimizer\'s step, but '
            + ("no hook reports steps here" if rows is not None else "this adapter cannot read gradients"),
            hint='use tracker="exact", or a torch optimizer with hooks="auto"',
        )
    dense = settings.tracker == "touched"
    return lambda: rows(dense=dense)


class Tracker:
    """The tracker of one session (see the module), for one checkpoint at a time."""

    def __init__(
        self, layout: Layout, kind: str, norm: Norm = "l2", seed: int = 0, *, budget: int | None = None
    ) -> None:
        """kind: one of `config.TRACKERS`. seed: decides which values are sampled.

        budget: bytes of a checkpoint. If it covers the whole state, a checkpoint takes everything that has moved.
        """
        self._layout = layout
        self._kind = kind
        self._norm = norm
        self._seed = seed
        self._turn: int | None = None
        self._number = {group.name: g for g, group in enumerate(layout.groups)}
        self._touches: dict[int, Touches] = {}
        self._marking = kind in ("touched", "auto")
        self._suspects = _NONE
        """Partitions that were not finite when last compared exactly, ascending."""
        self._scale: dict[int, NDArray[np.float64]] = {}
        """For the norm "relative": squared norms of the copies of a sampled group; NaN if unknown."""
        self._estimated: list[int] = []
        """Groups whose newest distances are estimates, ascending."""
        overlaps = kind in ("overlapped", "auto") and (budget is None or budget < layout.nbytes)
        self._sweep = Sweep(layout, norm) if overlaps else None
        self._parameter_bytes = sum(group.tensors[0].nbytes for group in layout.groups)
        self._swept: list[int] = []
        """Groups whose distances came from the sweep, ascending."""
        self._frozen: dict[int, tuple[list[tuple[int, int]], bool]] = {}
        """Marks of frozen groups at the last look, and whether the groups equalled their copies then."""

    # -- events of training ---------------------------------------------------------------------------------------

    def touch(self, rows: Mapping[str, torch.Tensor]) -> None:
        """Mark the rows that the coming step changes (`KnowsTouched`), in the training thread."""
        if not self._marking:
            return
        for name, touched in rows.items():
            g = self._number.get(name)
            if g is None or not self._layout.groups[g].partitions:
                continue
            if g not in self._touches:
                self._touches[g] = Touches(self._layout.groups[g], touched.device)
            self._touches[g].mark(touched)

    def give_up_touched(self) -> None:
        """Stop relying on marks, which have become wrong: from now on tables are compared like other groups."""
        self._marking = False
        self._touches.clear()

    def saved(self, ids: Ids) -> None:
        """Note that partitions `ids` (ascending) are equal to their copies."""
        bounds = np.searchsorted(ids, self._layout.base)
        for g, touches in self._touches.items():
            mine = ids[bounds[g] : bounds[g + 1]]
            if mine.size:
                touches.saved(mine - self._layout.base[g])
        for g, scale in self._scale.items():
            scale[ids[bounds[g] : bounds[g + 1]] - self._layout.base[g]] = np.nan
        if self._sweep is not None:
            self._sweep.forget(ids)

    def saved_all(self, but: Ids) -> None:
        """Note that all partitions except `but` (ascending) are equal to their copies."""
        if but.size:
            self.saved(np.setdiff1d(np.arange(self._layout.partitions), but, assume_unique=True))
            return
        for touches in self._touches.values():
            touches.saved_all()
        if self._sweep is not None:
            self._sweep.forget(slice(None))
        self._scale.clear()
        self._suspects = _NONE

    def moved(self, ids: Ids) -> None:
        """Note that partitions `ids` (ascending) differ from their copies, even if no step has changed them."""
        bounds = np.searchsorted(ids, self._layout.base)
        for g, touches in self._touches.items():
            touches.mark_partitions(ids[bounds[g] : bounds[g + 1]] - self._layout.base[g])
        # The copies may have changed as well.
        for g, scale in self._scale.items():
            scale[ids[bounds[g] : bounds[g + 1]] - self._layout.base[g]] = np.nan
        for g in [g for g in self._frozen if bounds[g] < bounds[g + 1]]:
            del self._frozen[g]
        if self._sweep is not None:
            self._sweep.forget(ids)

    # -- between checkpoints --------------------------------------------------------------------------------------

    @property
    def overlaps(self) -> bool:
        """Whether `look` has groups to compare."""
        return bool(self._swept)

    def look(self, live: LiveState, share: float) -> None:
        """Compare a `share`, in (0, 1], of the overlapped groups, after an iteration that changed parameters.

        Called in the worker thread; no other thread waits for it. See `interrupt`.
        """
        assert self._sweep is not None, "asked without `overlaps`"
        self._sweep.look(live, self._swept, share)

    def interrupt(self) -> None:
        """End looks early, because a checkpoint waits, until it requests distances or saves."""
        if self._sweep is not None:
            self._sweep.interrupt()

    def allow_full_looks(self) -> None:
        """Allow full looks again, because the checkpoint has begun."""
        if self._sweep is not None:
            self._sweep.allow_full_looks()

    # -- requests of a checkpoint ---------------------------------------------------------------------------------

    def distances(self, live: LiveState, step: int) -> NDArray[np.float64]:
        """Return the distance of every partition from its copy: float64 of shape (layout.partitions,).

        NaN or Inf where values are known not to be finite. Pass the partitions chosen by these through `check`.
        """
        self._turn = step if self._turn is None else self._turn + 1
        result, scratch = np.zeros(self._layout.partitions), Scratch()
        self._estimated, self._swept, whole = [], [], list[int]()
        for g in range(len(self._layout.groups)):
            span = self._span(g)
            if span.start == span.stop:
                continue
            touches = self._touches.get(g)
            if g in live.frozen and (found := self._of_frozen(live, g, scratch)) is not None:
                result[span] = found
                # Keep the distances correct for when the group is trained again.
                if touches is not None:
                    touches.known[:] = found
                    touches.looked()
                if self._sweep is not None:
                    self._sweep.forget(span)
                continue
            if touches is not None:
                result[span] = self._from_touches(live, g, touches, scratch)
            elif self._samples(g, live.tensors[g][0].device):
                result[span] = self._from_sample(live, g)
            elif self._sweep is not None and self._parameter_bytes >= SMALL:
                self._swept.append(g)
            else:
                whole.append(g)
                continue
            self._estimated.append(g)
        compared = list(zip(whole, live.groups_distances(whole, self._norm, scratch), strict=True))
        if self._sweep is not None:
            compared += zip(self._swept, self._sweep.distances(live, self._swept, scratch), strict=True)
        for g, distance in compared:
            result[self._span(g)] = distance
        self._look_again(live, result)
        return result

    def check(self, live: LiveState, ids: Ids, distance: NDArray[np.float64]) -> tuple[Ids, Ids]:
        """Split `ids` (ascending), chosen by `distance`, into those that may be copied and those that are not finite.

        Updates `distance` for partitions that were not compared completely.
        """
        bounds = np.searchsorted(ids, self._layout.base)
        for g in self._estimated:
            mine = ids[bounds[g] : bounds[g + 1]]
            if g in self._swept and not callable(self._norm):
                # They are about to become equal to their copies, so their exact distance is not needed.
                mine = mine[~live.finite(g, mine)]
            if mine.size:
                distance[mine] = live.distances_of(g, mine, self._norm)
        finite = np.isfinite(distance[ids])
        bad = ids[~finite]
        self._suspects = union(self._suspects, bad)
        return ids[finite], bad

    def _span(self, g: int) -> slice:
        return slice(int(self._layout.base[g]), int(self._layout.base[g + 1]))

    def _samples(self, g: int, device: torch.device) -> bool:
        group = self._layout.groups[g]
        values = group.rows_per_partition * math.prod(group.tensors[0].shape[1:])
        here = device.type == "cpu"
        wanted = self._kind == "sampled" or (self._kind == "auto" and not here)
        return wanted and not callable(self._norm) and values >= (NARROW_HERE if here else NARROW)

    def _from_sample(self, live: LiveState, g: int) -> NDArray[np.float64]:
        squares = live.sampled_squares(g, self._seed + g, self._turn or 0)
        if self._norm == "rms":
            squares /= values_of(self._layout.groups[g])
        elif self._norm == "relative":
            squares /= np.maximum(self._scale_of(live, g), np.finfo(np.float32).tiny)
        return np.sqrt(squares)

    def _scale_of(self, live: LiveState, g: int) -> NDArray[np.float64]:
        """Return the exact squared norms of all copies of the group; only new copies are read."""
        scale = self._scale.setdefault(g, np.full(self._layout.groups[g].partitions, np.nan))
        unknown = np.flatnonzero(np.isnan(scale))
        if unknown.size:
            scale[unknown] = live.saved_squares_of(g, unknown + self._layout.base[g])
        return scale

    def _of_frozen(self, live: LiveState, g: int, scratch: Scratch) -> NDArray[np.float64] | None:
        """Return the distances of a frozen group; None if it was written to, and a sample suffices."""
        mark, partitions = live.mark(g), self._layout.groups[g].partitions
        before, equal = self._frozen.get(g, (None, False))
        self._frozen[g] = mark, False
        if before != mark and self._samples(g, live.tensors[g][0].device):
            return None
        if before == mark and equal:
            some = np.arange((self._turn or 0) % min(_TURNS, partitions), partitions, _TURNS)
            if not live.distances_of(g, int(self._layout.base[g]) + some, self._norm).any():
                self._frozen[g] = mark, True
                return np.zeros(partitions)
        distance = live.group_distances(g, self._norm, scratch)
        self._frozen[g] = mark, not distance.any()
        return distance

    def _from_touches(
        self, live: LiveState, g: int, touches: Touches, scratch: Scratch
    ) -> NDArray[np.float64]:
        first, marked = int(self._layout.base[g]), touches.marked()
        ids = np.flatnonzero(marked)
        if ids.size <= _FEW * marked.size:
            touches.known[ids] = live.distances_of(g, first + ids, self._norm)
            if self._has_drifted(live, g, touches.known, marked):
                ids = np.arange(marked.size)
        if ids.size > _FEW * marked.size:
            touches.known = live.group_distances(g, self._norm, scratch)
        touches.looked()
        return touches.known

    def _has_drifted(
        self, live: LiveState, g: int, known: NDArray[np.float64], marked: NDArray[np.bool_]
    ) -> bool:
        """Return whether too many partitions moved without a gradient. Corrects `known` of those compared."""
        rng = np.random.Generator(np.random.PCG64([self._seed & 0xFFFFFFFFFFFFFFFF, g, self._turn or 0]))
        some = np.unique(rng.integers(marked.size, size=_OTHERS))
        some = some[~marked[some]]
        now = live.distances_of(g, int(self._layout.base[g]) + some, self._norm)
        moved = ~np.isclose(now, known[some], rtol=_SAME, atol=0.0, equal_nan=True)
        known[some] = now
        return bool(np.count_nonzero(moved) > _DRIFT * some.size)

    def _look_again(self, live: LiveState, distance: NDArray[np.float64]) -> None:
        """Compare partitions that were not finite exactly, until they are finite again."""
        bounds = np.searchsorted(self._suspects, self._layout.base)
        for g in self._estimated:
            mine = self._suspects[bounds[g] : bounds[g + 1]]
            if mine.size:
                distance[mine] = live.distances_of(g, mine, self._norm)
        self._suspects = self._suspects[~np.isfinite(distance[self._suspects])]
