"""Estimate squared distances of partitions from a sample of their values.

A partition's values are cut, in the order of memory, into strata of `stride` adjacent values, and one value of each is
sampled (stratified sampling). So every row and every part of a row is represented. The value's position starts at
random in every stratum and advances by one at every turn: after `stride` turns each value was sampled once. Over all
seeds every value is sampled with probability 1 / stride. So `stride` times the sum of the sampled squares is an
unbiased estimate of the squared distance (Horvitz and Thompson, 1952).

All partitions of a group are sampled at the same positions, so that an unusual column affects all of them equally.
Live values are gathered on their device, and only these are moved to the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.util.splitmix import mix64, mixed

NARROW = 1024
"""Partitions with fewer values are never sampled. They would need more than a quarter of their values, which touches
every cache line and takes as long as reading all."""
NARROW_HERE = 4096
"""The same limit for live values in host memory, where nothing is transferred and gathering costs more."""
LEAST = 256
"""Least number of values sampled per partition."""
STRIDE = 64
"""Values of a large partition per sampled value."""
_CHUNK = 1 << 20
"""Most sampled values that are gathered at once."""


def stride_of(values: int) -> int:
    """Return the stride of a partition of `values` values: one in `stride` is sampled."""
    return min(STRIDE, max(1, values // LEAST))


def sample(values: int, seed: int, turn: int) -> NDArray[np.int64]:
    """Return the positions of a partition's sampled values: int64, ascending. See the module.

    seed: seed of the group. turn: number of the look, from 0.
    """
    stride = stride_of(values)
    strata = -(-values // stride)
    start = np.arange(strata, dtype=np.uint64)
    start += np.uint64(mixed(seed))
    offset = (mix64(start) + np.uint64(turn)) % np.uint64(stride)
    picked = np.arange(strata, dtype=np.int64) * stride + offset.astype(np.int64)
    # The last stratum may be short: then some turns sample nothing of it.
    return picked[: np.searchsorted(picked, values)]


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


def sampled_squares(
    live: torch.Tensor, saved: torch.Tensor, per_partition: int, seed: int, turn: int
) -> NDArray[np.float64]:
    """Estimate the squared norm of (live - saved) per partition: float64 of shape (partitions,).

    live: on any device, with any strides. saved: of the same shape and dtype, contiguous in host memory. The result is
    NaN or Inf where sampled live values that are not finite differ from the saved ones.
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
    """Add estimates of partitions [first, last), which begin at the tensors' row 0 and have `per_partition` rows."""
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
    """Gather the values `at` of the partitions [start, stop): shape (stop - start, len(at))."""
    part = tensor.narrow(0, start * per_partition, (stop - start) * per_partition)
    if part.is_contiguous():
        return part.view(stop - start, -1).index_select(1, at)
    # Indexed in every dimension, because making the tensor contiguous would copy all of it.
    index, rest = [], at
    for size in reversed(part.shape[1:]):
        index.append(rest % size)
        rest = torch.div(rest, size, rounding_mode="floor")
    rows = torch.arange(stop - start, device=part.device)[:, None] * per_partition + rest
    return part[(rows, *reversed(index))]


def _squares(now: torch.Tensor, then: torch.Tensor) -> NDArray[np.float64]:
    """Sum squared differences per row; the few results that are not finite are computed again (see `distances`)."""
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
