"""Compute checksums of partitions: 64 bits each, over whole arrays of partitions (docs/FORMAT.md, section 5).

Pieces of 4 KiB and more are hashed one by one with XXH3. Smaller ones would cost more in calls than in bytes,
so they are hashed together: multilinear hashing over 32-bit words (Lemire and Kaser, "Strongly universal
string hashing is fast", 2014) with fixed odd constants, one array operation for thousands of pieces.
"""

from __future__ import annotations

import functools

import numpy as np
import xxhash
from numpy.typing import NDArray

from scarctl.util.splitmix import GAMMA, mix64

WIDE = 4096
"""Full pieces of at least this many bytes are hashed one by one."""

_WORDS = WIDE // 4
_CHUNK = 1 << 16  # words hashed at a time: source and constants stay in the cache
_FEW = 8  # below this many words per piece a loop over words beats a reduction over them


def _next(states: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the first value of splitmix64 from each state."""
    return mix64(states + GAMMA)


_W = _next(np.arange(_WORDS + 1, dtype=np.uint64)) | np.uint64(1)


@functools.cache
def tensor_constant(t: int) -> np.uint64:
    """Return the odd factor of a group's tensor number `t` in the partition's checksum."""
    return np.uint64(_next(np.array([(1 << 32) + t], np.uint64))[0] | np.uint64(1))


def hash_rows(rows: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Hash small pieces of equal length: uint8[n, L] with L < 4096, C-contiguous -> uint64[n]."""
    count, length = rows.shape
    words = -(-length // 4)
    out = np.zeros(count, np.uint64)
    factors = _W[:words]
    step = max(1, _CHUNK // max(words, 1))
    padded = np.zeros((min(step, count), words * 4), np.uint8) if length % 4 else None
    for i in range(0, count if words else 0, step):
        part = rows[i : i + step]
        if padded is not None:
            padded[: len(part), :length] = part
            part = padded[: len(part)]
        values = part.view("<u4")
        into = out[i : i + step]
        if words < _FEW:
            for w in range(words):
                into += values[:, w] * factors[w]
        else:
            np.einsum("ij,j->i", values, factors, out=into)
    out += np.uint64(length * int(_W[_WORDS]) % (1 << 64))
    return mix64(out)


def hash_pieces(data: NDArray[np.uint8], piece: int, count: int) -> NDArray[np.uint64]:
    """Hash `count` adjacent pieces in `data` (uint8, one dimension, C-contiguous).

    piece: bytes of a full piece; the last one may be shorter.
    """
    if piece >= WIDE:
        view = memoryview(data)
        digest = xxhash.xxh3_64_intdigest
        values = (digest(view[i * piece : (i + 1) * piece]) for i in range(count))
        return np.fromiter(values, np.uint64, count)
    full = count if piece == 0 else data.size // piece
    out = np.empty(count, np.uint64)
    out[:full] = hash_rows(data[: full * piece].reshape(full, piece))
    if full < count:
        out[full:] = hash_rows(data[full * piece :].reshape(1, -1))
    return out
