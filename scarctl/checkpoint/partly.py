"""Estimate how far partitions have moved, from a quarter of their values: another quarter each time.

A state that goes to the store as a whole needs no order of its partitions. There the distances only say what a loss
would cost, and comparing all values would take longer than copying them.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.checkpoint.distance import Scratch
from scarctl.state.layout import Group

PARTS = 4
"""Times that a partition is looked at until all of its values were compared."""
_LEAST = 1 << 10
"""Values of a partition below which a part of them saves no time: memory is read in lines."""
_CHUNK = 1 << 18
"""Values to compare at once."""


def estimates(
    group: Group, live: torch.Tensor, saved: torch.Tensor, look: int, scratch: Scratch
) -> NDArray[np.float64] | None:
    """Return the l2 distances of all partitions of one group, estimated: float64 of shape (group.partitions,).

    Args:
        group: the group whose parameter is compared.
        live: the parameter, of any device and strides.
        saved: its copy, contiguous in host memory, of the same shape and dtype.
        look: number of this estimate. Each `PARTS` successive ones compare all values.
        scratch: buffers.

    Returns None if all values have to be compared. The distance is 0 where the part has not changed, and of a shorter
    last partition. It is not finite if a value of the part is not; other parts may have such values, too.
    """
    plain = live.device.type == "cpu" and live.is_contiguous() and live.dtype.is_floating_point
    if not plain or not group.partitions or not live.dim():
        return None
    values = group.rows_per_partition * (live.numel() // group.rows)
    whole = group.rows // group.rows_per_partition
    if values < _LEAST or not whole:
        return None
    turn = look % PARTS
    first, last = values * turn // PARTS, values * (turn + 1) // PARTS
    now, then = (t.view(-1)[: whole * values].view(whole, values)[:, first:last] for t in (live, saved))
    found = np.zeros(group.partitions)
    together = max(1, _CHUNK // (last - first))
    for start in range(0, whole, together):
        stop = min(whole, start + together)
        difference = scratch.difference(now[start:stop], then[start:stop])
        found[start:stop] = torch.linalg.vector_norm(difference, dim=1).numpy()
    estimated: NDArray[np.float64] = found * np.sqrt(values / (last - first))
    return estimated
