"""Hash 64-bit integers by splitmix64 (Steele, Lea, Flood, 2014): fast, and the same on every machine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GAMMA = np.uint64(0x9E3779B97F4A7C15)
"""Difference of two successive states."""
MASK = 0xFFFFFFFFFFFFFFFF


def mix64(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finalizer in place, and return `z`: a bijection of the 64-bit integers."""
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def splitmix64(index: NDArray[np.integer], state: int) -> NDArray[np.uint64]:
    """Return the values at `index` (from 1) of the generator that begins with `state`. No two are equal."""
    z = index.astype(np.uint64)
    z *= GAMMA
    z += np.uint64(state & MASK)
    return mix64(z)


def mixed(value: int) -> int:
    """Return `mix64` of one integer, of which the lowest 64 bits count."""
    return int(mix64(np.array([value & MASK], dtype=np.uint64))[0])
