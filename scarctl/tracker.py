"""How far every partition has moved since it was saved, for choosing what to save: measured, or estimated for less.

exact     compares all values of the parameter with the copy: `scarctl.distance`.
overlapped  the same, but in pieces after all iterations between two checkpoints: `scarctl.sweep`. Parameters of less
          than `SMALL` bytes in all are compared at the checkpoint, and so is everything where everything may be saved.
sampled   compares a few values of every partition, others at every checkpoint: `scarctl.sampling`. Only where a
          partition has `sampling.NARROW` values or more, `NARROW_HERE` in the host's memory.
touched   compares the rows of embedding tables that got a gradient since the last look, and remembers the distances of
          all others: `scarctl.touches`. Of groups that are no tables it compares all.
auto      touched for what gets sparse gradients, sampled for large partitions on a GPU, overlapped for all else.

Whatever is chosen is looked at before it is copied: what is not finite is left out. Sealed checkpoints look at
everything, whatever the tracker.

**What is frozen** (`StateGroup.frozen`), and was found equal to its copies once, counts as equal as long as torch has
counted no write to it. Writes through `.data` are not counted: so one in 64 of its partitions is compared all the
same, others at every checkpoint, and all of them where one has moved.

**Rows without a gradient may move:** by weight decay, by momentum, when somebody writes to them. So at every look a
few hundred of the others are compared too. Where more than one in 64 of them has moved, the whole table is
compared, as `exact` does; fewer that moved unseen are found by a later look, or by the next sealed checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.adapter import Adapter, touched_rows_of
from scarctl.config import SessionSettings
from scarctl.distance import Norm, Scratch, values_of
from scarctl.errors import UsageError
from scarctl.layout import Layout
from scarctl.live import LiveState
from scarctl.sampling import NARROW, NARROW_HERE
from scarctl.sweep import Sweep
from scarctl.touches import Touches

Ids = NDArray[np.int64]
_NONE = np.empty(0, dtype=np.int64)
_OTHERS = 512
"""Partitions of a table that are looked at for a move without a gradient."""
_DRIFT = 1 / 64
"""Share of them that may have moved."""
_SAME = 1e-3
"""Relative difference of two distances that is rounding."""
_TURNS = 64
"""Looks in which every partition of a frozen group is compared once."""
SMALL = 16 << 20
"""Bytes that are compared in less time than it is worth to begin earlier."""
_FEW = 1 / 4
"""Share of a table's partitions of which to gather them takes less than to compare all."""


def touched_of(
    adapter: Adapter, settings: SessionSettings, *, auto: bool
) -> Callable[[], Mapping[str, torch.Tensor]] | None:
    """What gives the rows that the coming step changes; None where nobody wants to know.

    auto: the session hooks into the optimizers' steps. Raises UsageError for a tracker that needs what is not there.
    """
    if settings.tracker not in ("touched", "auto"):
        return None
    rows = touched_rows_of(adapter)
    if rows is None or not auto:
        if settings.tracker == "auto":
            return None
        raise UsageError(
            'tracker="touched" reads gradients right before an optimizer\'s step, and '
            + ("nothing tells of one here" if rows is not None else "there are none here"),
            hint='use tracker="exact", or a torch optimizer with auto=True',
        )
    dense = settings.tracker == "touched"
    return lambda: rows(dense=dense)


class Tracker:
    """See the module. Of one session; one checkpoint at a time."""

    def __init__(
        self, layout: Layout, kind: str, norm: Norm = "l2", seed: int = 0, *, budget: int | None = None
    ) -> None:
        """kind: one of `config.TRACKERS`. seed: decides which values are sampled.

        budget: bytes of a checkpoint. One that may take everything takes all that has moved by then.
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
        """Partitions that were not finite when they were looked at exactly, ascending."""
        self._scale: dict[int, NDArray[np.float64]] = {}
        """For the norm "relative": squared norms of the copies of a sampled group; NaN: not known."""
        self._estimated: list[int] = []
        """Groups whose newest distances are estimates, ascending."""
        overlaps = kind in ("overlapped", "auto") and (budget is None or budget < layout.nbytes)
        self._sweep = Sweep(layout, norm) if overlaps else None
        self._parameter_bytes = sum(group.tensors[0].nbytes for group in layout.groups)
        self._swept: list[int] = []
        """Groups whose distances were taken from the sweep, ascending."""
        self._frozen: dict[int, tuple[list[tuple[int, int]], bool]] = {}
        """Marks of frozen groups at the last look, and whether they were found equal to their copies then."""

    # -- what training tells --------------------------------------------------------------------------------------

    def touch(self, rows: Mapping[str, torch.Tensor]) -> None:
        """The coming step changes these rows: see `KnowsTouched`. Called in the training thread, before the step."""
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
        """Marks have become wrong: from now on tables are like all else."""
        self._marking = False
        self._touches.clear()

    def saved(self, ids: Ids) -> None:
        """Partitions `ids` (ascending) are equal to their copies."""
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
        """All are equal to their copies but these (ascending)."""
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
        """Partitions `ids` (ascending) are not equal to their copies, whatever the steps have changed."""
        bounds = np.searchsorted(ids, self._layout.base)
        for g, touches in self._touches.items():
            touches.mark_partitions(ids[bounds[g] : bounds[g + 1]] - self._layout.base[g])
        # Nor need they be the copies that they were.
        for g, scale in self._scale.items():
            scale[ids[bounds[g] : bounds[g + 1]] - self._layout.base[g]] = np.nan
        for g in [g for g in self._frozen if bounds[g] < bounds[g + 1]]:
            del self._frozen[g]
        if self._sweep is not None:
            self._sweep.forget(ids)

    # -- between checkpoints --------------------------------------------------------------------------------------

    @property
    def overlaps(self) -> bool:
        """Whether there is something to `look` at."""
        return bool(self._swept)

    def look(self, live: LiveState, share: float) -> None:
        """After an iteration that changed parameters: compare `share` of what is compared piece by piece, in (0, 1].

        Called in the worker thread; nobody has to wait for it. See `interrupt`.
        """
        assert self._sweep is not None, "asked without `overlaps`"
        self._sweep.look(live, self._swept, share)

    def interrupt(self) -> None:
        """A checkpoint waits: looks end early, until it asks for distances or saves."""
        if self._sweep is not None:
            self._sweep.interrupt()

    def go_on(self) -> None:
        """The checkpoint has begun."""
        if self._sweep is not None:
            self._sweep.go_on()

    # -- what a checkpoint asks -----------------------------------------------------------------------------------

    def distances(self, live: LiveState, step: int) -> NDArray[np.float64]:
        """Distance of every partition from its copy: float64 of shape (layout.partitions,).

        NaN or Inf where values are known not to be finite. What is chosen by these has to go through `check`.
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
                # So that it is right when it is trained again.
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
        """Of `ids` (ascending), chosen by `distance`: those that may be copied, and those that are not finite.

        Sets the distances of what was not compared as a whole.
        """
        bounds = np.searchsorted(ids, self._layout.base)
        for g in self._estimated:
            mine = ids[bounds[g] : bounds[g + 1]]
            if g in self._swept and not callable(self._norm):
                # They are about to become equal to their copies: how far they are now is of no use any more.
                mine = mine[~live.finite(g, mine)]
            if mine.size:
                distance[mine] = live.distances_of(g, mine, self._norm)
        finite = np.isfinite(distance[ids])
        bad = ids[~finite]
        self._suspects = np.union1d(self._suspects, bad)
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
        """Squared norms of all copies of the group, exact: of those only that are new since they were last needed."""
        scale = self._scale.setdefault(g, np.full(self._layout.groups[g].partitions, np.nan))
        unknown = np.flatnonzero(np.isnan(scale))
        if unknown.size:
            scale[unknown] = live.saved_squares_of(g, unknown + self._layout.base[g])
        return scale

    def _of_frozen(self, live: LiveState, g: int, scratch: Scratch) -> NDArray[np.float64] | None:
        """None where somebody has written to it since the last look, and a sample will do, as for a trained one."""
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
        """Whether partitions have moved without a gradient. Those that it has seen are set right."""
        rng = np.random.Generator(np.random.PCG64([self._seed & 0xFFFFFFFFFFFFFFFF, g, self._turn or 0]))
        some = np.unique(rng.integers(marked.size, size=_OTHERS))
        some = some[~marked[some]]
        now = live.distances_of(g, int(self._layout.base[g]) + some, self._norm)
        moved = ~np.isclose(now, known[some], rtol=_SAME, atol=0.0, equal_nan=True)
        known[some] = now
        return bool(np.count_nonzero(moved) > _DRIFT * some.size)

    def _look_again(self, live: LiveState, distance: NDArray[np.float64]) -> None:
        """Partitions that were not finite are looked at exactly until they are."""
        bounds = np.searchsorted(self._suspects, self._layout.base)
        for g in self._estimated:
            mine = self._suspects[bounds[g] : bounds[g + 1]]
            if mine.size:
                distance[mine] = live.distances_of(g, mine, self._norm)
        self._suspects = self._suspects[~np.isfinite(distance[self._suspects])]
