"""Measure how far the live parameters move between checkpoints, from a sample of their values.

This is part of every checkpoint, in its worker thread. It reads about `VALUES` values, whatever the state's size, and
keeps them until the next checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.state.layout import Layout
from scarctl.theory.history import History
from scarctl.util.splitmix import splitmix64

VALUES = 1 << 13
"""Size of the sample, which covers smaller states completely. Torch handles so few values in one thread, without
waiting for others that a busy machine may not run."""

Sample = NDArray[np.float64]


class Motion:
    """Adds the movement found by each look to a `History`."""

    def __init__(self, layout: Layout) -> None:
        self.history = History()
        self._groups = [g for g, group in enumerate(layout.groups) if group.kind == "parameter"]
        sizes = {g: math.prod(layout.groups[g].tensors[0].shape) for g in self._groups}
        whole = max(1, sum(sizes.values()))
        self._index: dict[int, torch.Tensor | None] = {}
        """Positions in the flat tensor by group; None means all."""
        self._weight: dict[int, float] = {}
        """Number of values that a sampled value represents, by group."""
        # The same layout gives the same positions. A repeated one does no harm.
        counts = {g: min(size, math.ceil(VALUES * size / whole)) for g, size in sizes.items()}
        drawn = splitmix64(np.arange(1, 1 + sum(counts.values())), len(sizes))
        first = 0
        for g, size in sizes.items():
            count = counts[g]
            if size <= count:
                self._index[g], self._weight[g] = None, 1.0
                continue
            index = (drawn[first : first + count] % np.uint64(size)).astype(np.int64)
            index.sort()
            self._index[g] = torch.from_numpy(index)
            self._weight[g] = size / count
            first += count
        self._reference: tuple[int, dict[int, Sample]] | None = None

    def look(self, tensors: Sequence[Sequence[torch.Tensor]], step: int) -> None:
        """Note how far the parameters have moved since an earlier look.

        tensors: live tensors, parallel to the layout's groups; the first of each is the parameter. step: iterations
        finished.
        """
        if self._reference is not None and step - self._reference[0] < self.history.least_gap:
            return
        groups = [g for g in self._groups if _moves(tensors[g][0])]
        values = values_at([tensors[g][0] for g in groups], [self._at(g, tensors[g][0]) for g in groups])
        now = dict(zip(groups, values, strict=True))
        before, self._reference = self._reference, (step, now)
        if before is None or not now:
            return
        with np.errstate(invalid="ignore", over="ignore"):
            changes = {g: now[g] - before[1][g] for g in now}
            # `change @ change` would wake other threads, and wait for them on a busy machine.
            square = sum(self._weight[g] * float(np.square(change).sum()) for g, change in changes.items())
        if not math.isfinite(square):
            self.forget()
            return
        self.history.add(before[0], step - before[0], math.sqrt(square))

    def forget(self) -> None:
        """Forget the last look, because the state has jumped."""
        self._reference = None

    def continue_from(self, history: History) -> None:
        """Continue from another state, with the history of that state."""
        self.history = history
        self.forget()

    def _at(self, g: int, tensor: torch.Tensor) -> torch.Tensor | None:
        index = self._index[g]
        if index is not None and index.device != tensor.device:
            index = self._index[g] = index.to(tensor.device)
        return index


def _moves(tensor: torch.Tensor) -> bool:
    """Return whether distances between the tensor's values are meaningful."""
    return tensor.is_floating_point() and tensor.element_size() > 1


def values_at(
    tensors: Sequence[torch.Tensor], indices: Sequence[torch.Tensor | None]
) -> list[NDArray[np.float64]]:
    """Copy some values of each tensor to the host: float64 (n,). What is on a GPU comes in one transfer per dtype.

    indices: positions in the flat tensor, int64 (n,); None: all.
    """
    picked = [_pick(tensor.detach(), index) for tensor, index in zip(tensors, indices, strict=True)]
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, values in enumerate(picked):
        if values.device.type != "cpu":
            kinds.setdefault((values.device, values.dtype), []).append(i)
    for mine in kinds.values():
        host = torch.cat([picked[i] for i in mine]).cpu()
        parts = torch.split(host, [picked[i].numel() for i in mine])
        for i, part in zip(mine, parts, strict=True):
            picked[i] = part
    return [values.to(torch.float64, copy=True).numpy() for values in picked]


def _pick(tensor: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    if index is not None:
        index = index.to(tensor.device)
        # Reshaping first would copy a whole tensor with other strides.
        flat = tensor.is_contiguous()
        tensor = tensor.view(-1).index_select(0, index) if flat else torch.take(tensor, index)
    return tensor.reshape(-1)
