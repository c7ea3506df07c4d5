"""Extrapolating recovery in a simulation: `scarctl.extrapolation`, fitted on all values of all partitions."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.daemon.arena import Arena
from scarctl.dtypes import torch_of
from scarctl.extrapolation import Fits, reach
from scarctl.live import LiveState
from scarctl.version import step_of

Ids = NDArray[np.int64]


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
        self.fits = Fits(len(self._saved))

    def before_save(self, live: LiveState, ids: Ids, iteration: int) -> None:
        """Learn from the state as it is, and remember what the partitions `ids` (ascending) have saved until now."""
        factors, steps = self._factors(iteration), step_of(self._arena.version)
        sums = np.zeros((3, len(self._saved)))
        for n, (g, saved) in enumerate(self._saved.items()):
            guess = self._guess(g, factors)
            moved = live.tensors[g][0].detach().reshape(saved.shape) - saved
            # Only where there is a guess: elsewhere there is nothing to learn about it.
            moved = moved.double() * (guess != 0).any(dim=1, keepdim=True)
            guess = guess.double()
            sums[:, n] = [float((a * b).sum()) for a, b in ((guess, moved), (guess, guess), (moved, moved))]
            rows = self._rows(g, np.isin(np.arange(self._arena.layout.partitions), ids)).bool()
            self._before[g][rows] = saved[rows]
        self.fits.learn(*sums)
        self._gap[ids] = iteration - steps[ids]

    def restore(self, live: LiveState, ids: Ids, iteration: int) -> None:
        """Move the partitions `ids`, which were just loaded, to where they probably were."""
        factors = self._factors(iteration)
        factors[~np.isin(np.arange(len(factors)), ids)] = 0
        with torch.no_grad():
            for a, (g, saved) in zip(self.fits.factor.tolist(), self._saved.items(), strict=True):
                target = live.tensors[g][0]
                target.add_((a * self._guess(g, factors)).to(saved.dtype).view(target.shape))

    def _factors(self, iteration: int) -> NDArray[np.float64]:
        """min(1, elapsed / gap) of every partition; 0 where it was saved only once."""
        return reach(iteration - step_of(self._arena.version), self._gap)

    def _guess(self, g: int, factors: NDArray[np.float64]) -> torch.Tensor:
        saved = self._saved[g]
        return self._rows(g, factors).unsqueeze(1).to(saved.dtype) * (saved - self._before[g])

    def _rows(self, g: int, values: NDArray[np.generic]) -> torch.Tensor:
        """Values of the partitions of group `g`, one for each of its rows."""
        layout = self._arena.layout
        group = layout.groups[g]
        mine = values[int(layout.base[g]) : int(layout.base[g + 1])]
        return torch.from_numpy(np.repeat(mine, group.rows_per_partition)[: group.rows])
