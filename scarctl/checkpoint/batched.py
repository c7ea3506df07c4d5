"""Measure the distances of several groups at once.

A model has hundreds of biases, scales and small matrices. Comparing them one by one takes half a dozen operations each,
and on an accelerator as many launches, a transfer and a wait. So small ones are packed into one buffer, and a few
operations (torch's `_foreach_` family, which its optimizers use as well) compare all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch._utils import _flatten_dense_tensors

from scarctl.checkpoint.distance import Norm, Scratch, accumulator, distances
from scarctl.config.checks import check_norm
from scarctl.state.layout import Group

_SMALL = 1 << 16
"""Most values of a parameter that is packed with others. Larger ones gain nothing, because their values dominate."""
_FEW = 16
"""Most partitions of a packed parameter. For more, one operation over all rows of a matrix is faster."""
_TOGETHER = 1 << 20
"""Most values that are packed at once."""


def distances_of_groups(
    groups: Sequence[Group],
    live: Sequence[Sequence[torch.Tensor]],
    saved: Sequence[Sequence[torch.Tensor]],
    norm: Norm = "l2",
    scratch: Scratch | None = None,
) -> list[NDArray[np.float64]]:
    """Return the distances of all partitions of each group; see `distance.distances` for arguments and errors."""
    check_norm(norm)
    scratch = scratch or Scratch()
    found: dict[int, NDArray[np.float64]] = {}
    if not callable(norm):
        for batch in _batches(groups, [tensors[0] for tensors in live]):
            some = [groups[i] for i in batch], [live[i][0] for i in batch], [saved[i][0] for i in batch]
            found.update(zip(batch, _packed_distances(*some, norm), strict=True))
    for i, group in enumerate(groups):
        # Overflow, or values that are not finite: only the unbatched method handles those.
        if i not in found or not np.isfinite(found[i]).all():
            found[i] = distances(group, live[i], saved[i], norm, scratch)
    return [found[i] for i in range(len(groups))]


def _batches(groups: Sequence[Group], live: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Yield indices of groups that can be packed together, at least two at a time."""
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, (group, tensor) in enumerate(zip(groups, live, strict=True)):
        small = 0 < tensor.numel() <= _SMALL and 0 < group.partitions <= _FEW
        if small and tensor.is_contiguous() and _is_packed(tensor.dtype):
            alike.setdefault((tensor.device, tensor.dtype), []).append(i)
    for mine in alike.values():
        turns = (np.cumsum([live[i].numel() for i in mine]) - 1) // _TOGETHER
        for batch in np.split(mine, np.flatnonzero(np.diff(turns)) + 1):
            if batch.size > 1:
                yield batch.tolist()


def _is_packed(dtype: torch.dtype) -> bool:
    # Complex values do not fit into a vector of reals, and few operations support floats of 8 bits.
    return not dtype.is_complex and not (dtype.is_floating_point and dtype.itemsize == 1)


@torch.no_grad()
def _packed_distances(
    groups: Sequence[Group], live: Sequence[torch.Tensor], saved: Sequence[torch.Tensor], norm: str
) -> list[NDArray[np.float64]]:
    """Return the distances of small groups whose live values have one dtype and device."""
    pieces = [count for group, tensor in zip(groups, live, strict=True) for count in _counts(group, tensor)]
    kind = accumulator(live[0].dtype)
    now = _flat(live).to(kind)
    then = _flat(saved).to(live[0].device).to(kind)
    found = [_norms(now.sub_(then), pieces)]
    if norm == "relative":
        found.append(_norms(then, pieces))
    # With the transfer of the copies, the only wait for an accelerator.
    rows = torch.stack(found).cpu().to(torch.float64).numpy()
    result: NDArray[np.float64] = rows[0]
    if norm == "rms":
        result = result / np.sqrt(pieces)
    elif norm == "relative":
        result = result / np.sqrt(np.maximum(np.square(rows[1]), np.finfo(np.float32).tiny))
    return np.split(result, np.cumsum([group.partitions for group in groups])[:-1])


def _counts(group: Group, tensor: torch.Tensor) -> list[int]:
    """Count the values of every partition, of which the last may be short."""
    whole = tensor.numel() // group.rows * group.rows_per_partition
    return [whole] * (group.partitions - 1) + [tensor.numel() - whole * (group.partitions - 1)]


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy all values of several tensors into one. DDP packs its buckets with the same function, which is faster than
    individual views.
    """
    return _flatten_dense_tensors(tensors)  # type: ignore[no-any-return, no-untyped-call]


def _norms(values: torch.Tensor, pieces: Sequence[int]) -> torch.Tensor:
    return torch.stack(torch._foreach_norm(values.split_with_sizes(pieces)))
