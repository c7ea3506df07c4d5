"""Measure how far each partition has moved since it was last saved.

The pass over the state is fused and chunked: differences are computed and reduced in a scratch buffer that stays in the
cache. So live and saved values are read once each, and no temporary has the size of a tensor.

The distance is the norm of Qiao et al. (ICML 2019), section 4.2: the parameters "which have changed the most since
they were previously saved" come first. A user's norm also receives the optimizer's slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.checkpoint.row_copies import units_of
from scarctl.config.checks import check_norm
from scarctl.errors import UsageError
from scarctl.state.layout import Group

NormFunction = Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], torch.Tensor]
"""`norm(live, saved) -> distances`: both map a slot's name ("" is the parameter) to a tensor of shape
(partitions, values per partition) in its own dtype; the result has shape (partitions,)."""

Norm = str | NormFunction
SQUARES = ("exp_avg_sq", "square_avg", "sum")
"""Slots in which optimizers keep squared gradients."""
_FLOOR = 1e-8
_Block = tuple[int, int, torch.Tensor, torch.Tensor]

# Values per chunk. On the CPU two float32 buffers of this size stay in the last-level cache, and the passes are few
# enough not to be slowed down by a busy interpreter; an accelerator wants fewer and larger launches still.
_CPU_CHUNK = 1 << 20
_DEVICE_CHUNK = 1 << 23
_LARGE = 1 << 14
"""Values of a partition above which it is compared in place instead of being gathered with others."""


def curvature(live: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return distances in which a squared change counts by the root of the optimizer's squared gradients.

    A norm for `Selection(norm=curvature)`. It ranks changes by what the loss feels of them, as far as the optimizer
    knows: `exp_avg_sq` of Adam, `square_avg` of RMSprop, `sum` of Adagrad, also with one value per row. Without such a
    slot it is the l2 norm. See docs/when-not-to-use.md for what it gains.
    """
    kind = accumulator(live[""].dtype)
    squared = (live[""].to(kind) - saved[""].to(kind)).abs().square()
    if found := [live[slot] for slot in SQUARES if slot in live]:
        # The floor keeps values without a gradient in the ranking: weight decay may move them.
        weight = found[0].to(squared.dtype).sqrt().add_(_FLOOR)
        squared *= weight.repeat_interleave(squared.shape[1] // weight.shape[1], dim=1)
    return squared.sum(dim=1).sqrt()


def distances(
    group: Group,
    live: Sequence[torch.Tensor],
    saved: Sequence[torch.Tensor],
    norm: Norm = "l2",
    scratch: Scratch | None = None,
) -> NDArray[np.float64]:
    """Return the distance of every partition of one group: float64 of shape (group.partitions,).

    `live[t]` and `saved[t]` are the tensors of `group.tensors[t]`, of the same shape and dtype. `live` may be on any
    device and need not be contiguous; `saved` is contiguous in host memory. The result is NaN or Inf exactly
    where live values that are not finite differ from the saved ones. A value that is equal to the saved one
    (the -inf of an attention mask) counts as unchanged.

    Raises UsageError when a user's norm returns another shape.
    """
    check_norm(norm)
    if group.partitions == 0:
        return np.zeros(0)
    if callable(norm):
        return _user_distances(group, live, saved, norm)
    per_partition = group.rows_per_partition
    squared = _squares(live[0], saved[0], per_partition, scratch or Scratch(), relative=norm == "relative")
    if norm == "rms":
        squared /= values_of(group)
    return np.sqrt(squared)


def values_of(group: Group) -> NDArray[np.float64]:
    """Count the parameter's values in every partition, of which the last may be short: float64 (group.partitions,)."""
    row = max(1, math.prod(group.tensors[0].shape[1:]))
    values = np.full(group.partitions, float(row * group.rows_per_partition))
    values[-1:] = row * (group.rows - (group.partitions - 1) * group.rows_per_partition)
    return values


def _squares(
    live: torch.Tensor, saved: torch.Tensor, per_partition: int, scratch: Scratch, *, relative: bool
) -> NDArray[np.float64]:
    """Return the squared norms of (live - saved) per partition, divided by those of `saved` if `relative`."""
    rows = live.shape[0] if live.dim() else 1
    partitions = -(-rows // per_partition)
    result = torch.zeros(partitions, dtype=accumulator(live.dtype), device=live.device)
    scale = torch.zeros_like(result) if relative else None
    values = per_partition * (live.numel() // rows)
    if _is_plain(live) and not relative and 0 < values <= _CPU_CHUNK:
        _plain_norms(live.view(-1), saved.view(-1), values, scratch, result)
        result.square_()
    else:
        for first, last, a, b in _blocks(live, saved, per_partition):
            difference = scratch.difference(a, b)
            _row_squares(difference, result[first:last])
            if scale is not None:
                _row_squares(scratch.widen(b, a), scale[first:last])
    squared = result.cpu().numpy().astype(np.float64)
    again = np.flatnonzero(~np.isfinite(squared))
    for batch in _batches(again, rows, per_partition, values, _chunk(live)):
        squared[batch] = _careful_squares(
            _rows_of(live, batch, per_partition), _rows_of(saved, batch, per_partition), batch.size
        )
    if scale is not None:
        squared /= np.maximum(scale.cpu().numpy().astype(np.float64), np.finfo(np.float32).tiny)
    return squared


def _chunk(live: torch.Tensor) -> int:
    """Return the values to compare at once."""
    return _CPU_CHUNK if live.device.type == "cpu" else _DEVICE_CHUNK


def _is_plain(live: torch.Tensor) -> bool:
    return live.device.type == "cpu" and live.is_contiguous() and not live.dtype.is_complex


def _plain_norms(
    live: torch.Tensor, saved: torch.Tensor, values: int, scratch: Scratch, result: torch.Tensor
) -> None:
    """Compute the norms of flat tensors in host memory, the usual case, in as few passes as possible."""
    total = live.numel()
    together = max(1, _CPU_CHUNK // values)
    for start in range(0, total, together * values):
        stop = min(total, start + together * values)
        difference = scratch.difference(live[start:stop], saved[start:stop])
        first, whole = start // values, (stop - start) // values
        if whole:
            block = difference[: whole * values].view(whole, values)
            torch.linalg.vector_norm(block, dim=1, out=result[first : first + whole])
        if whole * values < stop - start:
            torch.linalg.vector_norm(difference[whole * values :], out=result[first + whole])


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for differences of values of `dtype`, and for their norms."""
    if dtype == torch.float64 or not (dtype.is_floating_point or dtype.is_complex):
        return torch.float64
    return torch.float32


def _rows(tensor: torch.Tensor, start: int, count: int) -> torch.Tensor:
    return tensor[start : start + count] if tensor.dim() else tensor.reshape(1)


def _matrix(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """View the real values of `tensor` as (rows, values per row); copy only if the strides require it."""
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor)
    return tensor.reshape(rows, -1)


def _blocks(live: torch.Tensor, saved: torch.Tensor, per_partition: int) -> Iterator[_Block]:
    """Yield pieces (first, last, live, saved) with (last - first) partitions as rows of two matrices of one shape.

    A partition larger than a chunk comes in several pieces with the same `first`: the caller adds them up.
    """
    if not live.numel():
        return
    chunk = _chunk(live)
    rows = live.shape[0] if live.dim() else 1
    values = (live.numel() // rows) * (2 if live.dtype.is_complex else 1)
    whole = rows // per_partition
    together = max(1, chunk // (per_partition * values))
    now, then = _cutter(live, whole, per_partition), _cutter(saved, whole, per_partition)
    for first in range(0, whole, together):
        last = min(whole, first + together)
        yield from _pieces(first, last, now(first, last), then(first, last), chunk)
    if whole * per_partition < rows:
        start = whole * per_partition
        tail = _matrix(_rows(live, start, rows - start), 1), _matrix(_rows(saved, start, rows - start), 1)
        yield from _pieces(whole, whole + 1, *tail, chunk)


def _cutter(tensor: torch.Tensor, whole: int, per_partition: int) -> Callable[[int, int], torch.Tensor]:
    """Return a function that returns partitions [first, last), of the first `whole`, as rows of a matrix."""
    if tensor.is_contiguous():
        matrix = _matrix(_rows(tensor, 0, whole * per_partition), whole) if whole else tensor
        return lambda first, last: matrix[first:last]
    # Reshaping the whole tensor would copy it.
    return lambda first, last: _matrix(
        _rows(tensor, first * per_partition, (last - first) * per_partition), last - first
    )


def _pieces(first: int, last: int, a: torch.Tensor, b: torch.Tensor, chunk: int) -> Iterator[_Block]:
    if last - first > 1 or a.shape[1] <= chunk:
        yield first, last, a, b
        return
    for column in range(0, a.shape[1], chunk):
        yield first, last, a[:, column : column + chunk], b[:, column : column + chunk]


class Scratch:
    """Buffers for differences, reused from block to block and from group to group."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}

    def difference(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return a - b in a wider dtype, to avoid overflow and rounding; valid until the next call."""
        out = self._buffer(0, a)
        if a.dtype == out.dtype:
            return torch.sub(a, b.to(a.device), out=out)
        return out.copy_(a).sub_(self.widen(b, a))

    def widen(self, b: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return `b` in the dtype of differences, on the device of `like`; valid until the next call."""
        return self._buffer(1, like).copy_(b)

    def _buffer(self, which: int, like: torch.Tensor) -> torch.Tensor:
        size, key = like.numel(), (which, accumulator(like.dtype), like.device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[key] = torch.empty(size, dtype=key[1], device=like.device)
        return buffer[:size].view(like.shape)


def _row_squares(matrix: torch.Tensor, out: torch.Tensor) -> None:
    """Add the sum of squares of every row of `matrix` to `out`."""
    if matrix.shape[0] == 1:
        row = matrix[0]
        out += torch.dot(row, row)
    else:
        out += torch.linalg.vector_norm(matrix, dim=1).square_()


def _careful_squares(live: torch.Tensor, saved: torch.Tensor, count: int) -> NDArray[np.float64]:
    """Return squared norms of `count` partitions of equal size, float64 (count,), even where the fast way overflows.

    Equal infinities count as unchanged. A saved copy may contain values that are not finite.
    """
    a = _matrix(live, count).cpu().to(torch.float64)
    b = _matrix(saved, count).to(torch.float64)
    difference = torch.where(torch.isfinite(b), a - b, a)
    difference = torch.where(a == b, torch.zeros_like(a), difference)
    squares: NDArray[np.float64] = difference.square_().sum(dim=1).numpy()
    return squares


def _user_distances(
    group: Group, live: Sequence[torch.Tensor], saved: Sequence[torch.Tensor], norm: NormFunction
) -> NDArray[np.float64]:
    per_partition = group.rows_per_partition
    slots = [spec.slot for spec in group.tensors]
    chunk = _chunk(live[0])
    values = max(1, live[0].numel() // group.rows) * per_partition
    together = max(1, chunk // values)
    whole = group.rows // per_partition
    spans = [(first, min(whole, first + together)) for first in range(0, whole, together)]
    if whole < group.partitions:
        spans.append((whole, whole + 1))
    result = np.empty(group.partitions)
    for first, last in spans:
        start, count = first * per_partition, (last - first) * per_partition
        shape = (last - first, -1)
        now = {s: _rows(t, start, count).reshape(shape) for s, t in zip(slots, live, strict=True)}
        then = {
            s: _rows(t, start, count).reshape(shape).to(live[0].device)
            for s, t in zip(slots, saved, strict=True)
        }
        answer = norm(now, then)
        if not isinstance(answer, torch.Tensor) or answer.shape != (last - first,):
            what = tuple(answer.shape) if isinstance(answer, torch.Tensor) else type(answer).__name__
            raise UsageError(
                f"the norm function returned {what} for {last - first} partitions of {group.name!r}",
                hint="return one distance per partition: a tensor of shape (partitions,)",
            )
        result[first:last] = answer.detach().cpu().to(torch.float64).numpy()
    return result


def distances_of(
    group: Group,
    live: Sequence[torch.Tensor],
    saved: Sequence[torch.Tensor],
    ids: NDArray[np.int64],
    norm: Norm = "l2",
    scratch: Scratch | None = None,
) -> NDArray[np.float64]:
    """Return the distances of some of a group's partitions: float64 of the shape of `ids`, which ascend.

    See `distances`.
    """
    result = np.empty(ids.size)
    per_partition = group.rows_per_partition
    tensors = range(len(live) if callable(norm) else 1)
    values = max(1, math.prod(group.tensors[0].shape[1:])) * per_partition
    scratch = scratch or Scratch()
    done = 0
    for batch in _batches(ids, group.rows, per_partition, values, _chunk(live[0])):
        now = [_rows_of(live[t], batch, per_partition) for t in tensors]
        then = [_rows_of(saved[t], batch, per_partition) for t in tensors]
        specs = tuple(replace(group.tensors[t], shape=tuple(now[t].shape)) for t in tensors)
        part = Group(group.name, group.kind, per_partition, specs)
        result[done : done + batch.size] = distances(part, now, then, norm, scratch)
        done += batch.size
    return result


def finite(group: Group, live: torch.Tensor, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether all values of each partition in `ids` (ascending) are finite: bool of the shape of `ids`.

    live: the tensor of `group.tensors[0]`. This is one pass. The result may be False if the sum of large finite values
    overflows.
    """
    result = np.empty(ids.size, dtype=bool)
    per_partition = group.rows_per_partition
    values = max(1, math.prod(group.tensors[0].shape[1:])) * per_partition
    done = 0
    # A value that is not finite makes the sum so. One sum for all is faster than one for each.
    if ids.size and int(ids[-1]) - int(ids[0]) == ids.size - 1 and not live.is_complex():
        rows = _rows(live, int(ids[0]) * per_partition, ids.size * per_partition)
        if torch.isfinite(rows.sum(dtype=accumulator(rows.dtype))):
            result[:] = True
            return result
    for batch in _batches(ids, group.rows, per_partition, values, _chunk(live)):
        matrix = _matrix(_rows_of(live, batch, per_partition), batch.size)
        sums = matrix.sum(dim=1, dtype=accumulator(matrix.dtype))
        result[done : done + batch.size] = torch.isfinite(sums).cpu().numpy()
        done += batch.size
    return result


def _batches(
    ids: NDArray[np.int64], rows: int, per_partition: int, values: int, chunk: int
) -> Iterator[NDArray[np.int64]]:
    """Split `ids` (ascending) into pieces of at most a chunk, or one partition; a short last one is alone.

    Large partitions that are not adjacent come in several pieces on the host, so that they need not be gathered.
    chunk: see `_chunk`.
    """
    short = rows // per_partition if rows % per_partition else -1
    together = max(1, chunk // max(1, values))
    whole = ids.size - int(bool(ids.size) and int(ids[-1]) == short)
    apart = (
        np.flatnonzero(np.diff(ids[:whole]) != 1) + 1 if values >= _LARGE and chunk == _CPU_CHUNK else ids[:0]
    )
    for start, stop in pairwise([0, *apart.tolist(), whole]):
        for first in range(start, stop, together):
            yield ids[first : min(stop, first + together)]
    if whole < ids.size:
        yield ids[whole:]


def _rows_of(tensor: torch.Tensor, ids: NDArray[np.int64], per_partition: int) -> torch.Tensor:
    """Return the rows of the partitions `ids`, concatenated: a view if they are adjacent."""
    first, count = int(ids[0]), ids.size
    if int(ids[-1]) - first == count - 1:
        return _rows(tensor, first * per_partition, count * per_partition)
    units = units_of(tensor, per_partition)
    if units is not None:
        picked = torch.from_numpy(units.take(ids).view(np.uint8)).view(tensor.dtype)
        return picked.view(ids.size * per_partition, *tensor.shape[1:])
    rows = (ids[:, None] * per_partition + np.arange(per_partition)).reshape(-1)
    return tensor.index_select(0, torch.from_numpy(rows).to(tensor.device))


def changed(group: Group, live: Sequence[torch.Tensor], saved: Sequence[torch.Tensor]) -> NDArray[np.bool_]:
    """Mark the partitions that differ from their saved copy in any byte of any tensor: bool (group.partitions,)."""
    result = np.zeros(group.partitions, dtype=bool)
    per_partition = group.rows_per_partition
    for now, then in zip(live, saved, strict=True):
        for first, last, a, b in _blocks(bits(now), bits(then), per_partition):
            result[first:last] |= (a != b.to(a.device)).any(dim=1).cpu().numpy()
    return result


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bit patterns as integers, so that NaN equals itself and -0.0 differs from 0.0."""
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.element_size()])
