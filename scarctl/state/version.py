"""Order saved copies by version: epoch, then step, packed into one int64.

After a roll-back or a takeover a run starts a new epoch. So its copies are newer than those of the abandoned future,
although their steps are smaller. Packing both into one number lets arrays of versions be compared in one operation.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

STEP_BITS = 40
MAX_STEP = (1 << STEP_BITS) - 1
MAX_EPOCH = (1 << 23) - 1
NEVER = -1
"""Version of a partition that was never saved."""

_CHUNK = 1 << 15
"""Versions per piece of a computation."""

IntOrArray = TypeVar("IntOrArray", int, NDArray[np.int64])


def pack(epoch: int, step: int) -> int:
    """Return the version of a copy taken at `step` in `epoch`. Raises ValueError when either is out of range."""
    if not 1 <= epoch <= MAX_EPOCH:
        raise ValueError(f"epoch {epoch} is not in 1..{MAX_EPOCH}")
    if not 0 <= step <= MAX_STEP:
        raise ValueError(f"step {step} is not in 0..{MAX_STEP}")
    return (epoch << STEP_BITS) | step


def epoch_of(version: IntOrArray) -> IntOrArray:
    """Return the epoch of a version, or of an array of versions; -1 for `NEVER`."""
    return version >> STEP_BITS


def ages_of(versions: NDArray[np.int64], step: int, sealed: int = NEVER) -> NDArray[np.int64]:
    """Return the iterations from each copy to `step`: int64 of the shape of `versions`; step + 1 without a copy.

    sealed: version of a later seal, whose values all copies have. Works in pieces that fit the cache.
    """
    result = np.empty_like(versions)
    for first in range(0, versions.size, _CHUNK):
        part, out = versions[first : first + _CHUNK], result[first : first + _CHUNK]
        np.bitwise_and(np.maximum(part, sealed, out=out), MAX_STEP, out=out)
        np.maximum(np.subtract(step, out, out=out), 0, out=out)
        out[part < 0] = step + 1
    return result


def step_of(version: IntOrArray) -> IntOrArray:
    """Return the step of a version, or of an array of versions, in iterations; -1 for `NEVER`."""
    if isinstance(version, np.ndarray):
        return np.where(version < 0, np.int64(NEVER), version & MAX_STEP)
    return NEVER if version < 0 else version & MAX_STEP
