"""Extrapolating recovery: where a lost partition probably was, by how it moved before it was saved.

A partition with the saved values s, saved `gap` iterations after the values b before, and lost `elapsed` iterations
after s, comes back as s + a * min(1, elapsed / gap) * (s - b). The factor a is one number per group, fitted as the run
goes: before every checkpoint the live values say what the best a would have been, by least squares over all partitions
of the group. It is 0 while its guesses, each judged before it was learnt from, would have done harm so far.

Only parameters of floating point are extrapolated, never the optimizer's slots.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.daemon.arena import Arena
from scarctl.dtypes import torch_of
from scarctl.live import LiveState
from scarctl.version import step_of

Ids = NDArray[np.int64]

_KEEP = 0.9
"""Weight of what was seen one checkpoint earlier."""


class Fit:
    """Least squares of movements y by guesses d, over checkpoints: a = Σ d·y / Σ d·d, shrunk towards 0.

    Each checkpoint counts as much as the others however far things moved, and one more that says 0 is counted in.
    """

    def __init__(self) -> None:
        self._count = self._dy = self._dd = self._gain = 0.0

    @property
    def candidate(self) -> float:
        """The factor, whether or not it has helped."""
        if not self._dd > 0:
            return 0.0
        return min(1.0, max(0.0, self._dy / self._dd * self._count / (self._count + 1)))

    @property
    def factor(self) -> float:
        """The factor to use: 0 unless candidates would have made squared perturbations smaller so far."""
        return self.candidate if self._gain > 0 else 0.0

    def learn(self, dy: float, dd: float, yy: float) -> None:
        """One checkpoint's d·y, d·d and y·y. Nothing is learnt where nothing moved, or something is not finite."""
        if not (np.isfinite([dy, dd, yy]).all() and dd > 0 and yy > 0):
            return
        a = self.candidate
        self._gain = _KEEP * self._gain + (2 * a * dy - a * a * dd) / yy
        self._dy = _KEEP * self._dy + dy / yy
        self._dd = _KEEP * self._dd + dd / yy
        self._count = _KEEP * self._count + 1


class Extrapolator:
    """What one running checkpoint remembers for it: every partition's values before the saved ones, and the fits."""

    def __init__(self, arena: Arena) -> None:
        layout = arena.layout
        self._arena = arena
        self._gap = np.zeros(layout.partitions, dtype=np.int64)
        self._saved: dict[int, torch.Tensor] = {}
        for g, group in enumerate(layout.groups):
            spec = group.tensors[0]
            dtype = torch_of(spec.dtype)
            if group.kind == "parameter" and group.partitions and dtype.is_floating_point:
                flat = torch.from_numpy(arena.rows(g, 0)).view(-1).view(dtype)
                self._saved[g] = flat.view(group.rows, -1)
        self._before = {g: saved.clone() for g, saved in self._saved.items()}
        self.fits = {g: Fit() for g in self._saved}

    def before_save(self, live: LiveState, ids: Ids, iteration: int) -> None:
        """Learn from the state as it is, and remember what the partitions `ids` (ascending) have saved until now."""
        factors, steps = self._factors(iteration), step_of(self._arena.version)
        for g, saved in self._saved.items():
            guess = self._guess(g, factors)
            moved = live.tensors[g][0].detach().reshape(saved.shape) - saved
            # Only where there is a guess: elsewhere there is nothing to learn about it.
            moved = moved.double() * (guess != 0).any(dim=1, keepdim=True)
            guess = guess.double()
            self.fits[g].learn(
                *(float((a * b).sum()) for a, b in ((guess, moved), (guess, guess), (moved, moved)))
            )
            rows = self._rows(g, np.isin(np.arange(self._arena.layout.partitions), ids)).bool()
            self._before[g][rows] = saved[rows]
        self._gap[ids] = iteration - steps[ids]

    def restore(self, live: LiveState, ids: Ids, iteration: int) -> None:
        """Move the partitions `ids`, which were just loaded, to where they probably were."""
        factors = self._factors(iteration)
        factors[~np.isin(np.arange(len(factors)), ids)] = 0
        with torch.no_grad():
            for g, saved in self._saved.items():
                target = live.tensors[g][0]
                target.add_(
                    (self.fits[g].factor * self._guess(g, factors)).to(saved.dtype).view(target.shape)
                )

    def _factors(self, iteration: int) -> NDArray[np.float64]:
        """min(1, elapsed / gap) of every partition; 0 where it was saved only once."""
        elapsed = iteration - step_of(self._arena.version)
        return np.where(self._gap > 0, np.clip(elapsed / np.maximum(self._gap, 1), 0.0, 1.0), 0.0)

    def _guess(self, g: int, factors: NDArray[np.float64]) -> torch.Tensor:
        saved = self._saved[g]
        return self._rows(g, factors).unsqueeze(1).to(saved.dtype) * (saved - self._before[g])

    def _rows(self, g: int, values: NDArray[np.generic]) -> torch.Tensor:
        """Values of the partitions of group `g`, one for each of its rows."""
        layout = self._arena.layout
        group = layout.groups[g]
        mine = values[int(layout.base[g]) : int(layout.base[g + 1])]
        return torch.from_numpy(np.repeat(mine, group.rows_per_partition)[: group.rows])
