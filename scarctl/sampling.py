"""Squared distances of partitions, estimated from some of their values.

A partition's values are cut, in the order of memory, into strata of `stride` adjacent values, and one value of each is
looked at (stratified sampling), so that every row and every part of a row has its say. Which one begins at random
in every stratum, and moves on by one at every turn: after `stride` turns each value was looked at once. Over all seeds
every value is looked at with probability 1 / stride, so `stride` times the sum of the sampled squares is an
unbiased estimate of the squared distance (Horvitz and Thompson, 1952).

The same values are taken of all partitions of a group: what is special about a column is so for all that are compared.
Live values are gathered where they are, and only they are moved to the host.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.layout import mix64

NARROW = 1024
"""Partitions with fewer values are never sampled: more than a quarter of them would be needed, which is somewhere in
every cache line, and takes as long as all of them."""
NARROW_HERE = 4096
"""The same where live values are in the host's own memory: nothing has to be moved, and to gather takes its time."""
LEAST = 256
"""Values that are looked at in a partition, at least."""
STRIDE = 64
"""Of a large partition one in so many values is looked at."""
_CHUNK = 1 << 20
"""Sampled values that are gathered at once."""


def stride_of(values: int) -> int:
    """Of a partition with so many values one in how many is looked at."""
    return min(STRIDE, max(1, values // LEAST))


def sample(values: int, seed: int, turn: int) -> NDArray[np.int64]:
    """Which of a partition's values are looked at, ascending: int64. See the module.

    seed: of the group. turn: number of the look, any whole number from 0.
    """
    stride = stride_of(values)
    strata = -(-values // stride)
    start = np.arange(strata, dtype=np.uint64)
    start += mix64(np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64))
    offset = (mix64(start) + np.uint64(turn)) % np.uint64(stride)
    picked = np.arange(strata, dtype=np.int64) * stride + offset.astype(np.int64)
    # The last stratum may be short: then nothing of it is looked at in some turns.
    return picked[: np.searchsorted(picked, values)]


def values_at(tensor: torch.Tensor, index: torch.Tensor | None) -> NDArray[np.float64]:
    """A private copy of the values at these positions, int64, of the flat tensor (None: of all), in host memory."""
    tensor = tensor.detach()
    if index is not None:
        index = index.to(tensor.device)
        # Not of a reshaped tensor: that would copy all of one with other strides.
        flat = tensor.is_contiguous()
        tensor = tensor.view(-1).index_select(0, index) if flat else torch.take(tensor, index)
    found: NDArray[np.float64] = tensor.cpu().to(torch.float64, copy=True).reshape(-1).numpy()
    return found


def sampled_squares(
    live: torch.Tensor, saved: torch.Tensor, per_partition: int, seed: int, turn: int
) -> NDArray[np.float64]:
    """Estimates of the squared norm of (live - saved) per partition: float64 of shape (partitions,).

    live: on any device, with any strides. saved: of the same shape and dtype, contiguous in host memory. NaN or Inf
    where sampled live values that are not finite differ from the saved ones.
    """
    if live.dtype.is_complex:
        live, saved = torch.view_as_real(live), torch.view_as_real(saved)
    rows = live.shape[0] if live.dim() else 1
    live, saved = (t if t.dim() else t.reshape(1) for t in (live, saved))
    result = np.zeros(-(-rows // per_partition))
    whole = rows // per_partition
    _add(live, saved, 0, whole, per_partition, seed, turn, result)
    if whole < result.size:
        tail = rows - whole * per_partition
        _add(
            live.narrow(0, rows - tail, tail),
            saved.narrow(0, rows - tail, tail),
            whole,
            whole + 1,
            tail,
            seed,
            turn,
            result,
        )
    return result


def _add(
    live: torch.Tensor,
    saved: torch.Tensor,
    first: int,
    last: int,
    per_partition: int,
    seed: int,
    turn: int,
    result: NDArray[np.float64],
) -> None:
    """Estimates of partitions [first, last), which begin at the tensors' row 0 and have `per_partition` rows."""
    values = per_partition * math.prod(live.shape[1:])
    picked = torch.from_numpy(sample(values, seed, turn))
    if not picked.numel() or first == last:
        return
    scale = float(stride_of(values))
    there = picked.to(live.device)
    together = max(1, _CHUNK // picked.numel())
    for start in range(0, last - first, together):
        stop = min(last - first, start + together)
        now = _gather(live, start, stop, per_partition, there).cpu()
        then = _gather(saved, start, stop, per_partition, picked)
        squares = _squares(now, then)
        result[first + start : first + stop] = squares * scale


def _gather(
    tensor: torch.Tensor, start: int, stop: int, per_partition: int, at: torch.Tensor
) -> torch.Tensor:
    """Values `at` of the partitions [start, stop): shape (stop - start, len(at))."""
    part = tensor.narrow(0, start * per_partition, (stop - start) * per_partition)
    if part.is_contiguous():
        return part.view(stop - start, -1).index_select(1, at)
    # By index in every dimension: to make it contiguous would copy all of it.
    index, rest = [], at
    for size in reversed(part.shape[1:]):
        index.append(rest % size)
        rest = torch.div(rest, size, rounding_mode="floor")
    rows = torch.arange(stop - start, device=part.device)[:, None] * per_partition + rest
    return part[(rows, *reversed(index))]


def _squares(now: torch.Tensor, then: torch.Tensor) -> NDArray[np.float64]:
    """Sums of squared differences per row; the few that are not finite are looked at again (see `distances`)."""
    kind = torch.float32 if now.dtype.is_floating_point and now.element_size() <= 4 else torch.float64
    difference = now.to(kind) - then.to(kind)
    squares: NDArray[np.float64] = (
        torch.linalg.vector_norm(difference, dim=1).to(torch.float64).square_().numpy()
    )
    again = np.flatnonzero(~np.isfinite(squares))
    if again.size:
        a, b = now[again].to(torch.float64), then[again].to(torch.float64)
        careful = torch.where(torch.isfinite(b), a - b, a)
        careful = torch.where(a == b, torch.zeros_like(a), careful)
        squares[again] = careful.square().sum(dim=1).numpy()
    return squares
