"""Test checksums against a plain reading of docs/FORMAT.md, one piece and one word at a time."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from scarctl.state.layout import TensorSpec, build_layout
from scarctl.store.checksum import hash_pieces, hash_rows, tensor_constant
from scarctl.store.segment import partition_checksums
from tests.support.splitmix import mix

M = (1 << 64) - 1


def splitmix64(x: int) -> int:
    return mix(x + 0x9E3779B97F4A7C15 & M)


def reference(piece: bytes, full: int) -> int:
    if full >= 4096:
        return xxhash.xxh3_64_intdigest(piece)
    words = [int.from_bytes(piece[i : i + 4], "little") for i in range(0, len(piece), 4)]
    total = sum(x * (splitmix64(i) | 1) for i, x in enumerate(words))
    return mix(total + len(piece) * (splitmix64(1024) | 1) & M)


@given(st.integers(0, 70), st.integers(1, 9), st.integers(0, 2**32))
def test_small_pieces_are_hashed_as_the_format_says(length: int, count: int, seed: int) -> None:
    rows = np.random.default_rng(seed).integers(0, 256, (count, length), dtype=np.uint8)
    assert hash_rows(rows).tolist() == [reference(row.tobytes(), length) for row in rows]


@pytest.mark.parametrize("length", [1, 4, 255, 1364, 4092, 4093, 4095])
def test_many_small_pieces_are_hashed_in_chunks(length: int) -> None:
    rows = np.random.default_rng(length).integers(0, 256, (70_000 // length + 40, length), dtype=np.uint8)
    hashes = hash_rows(rows)
    for i in (0, 1, len(rows) // 2, len(rows) - 1):
        assert int(hashes[i]) == reference(rows[i].tobytes(), length)


@pytest.mark.parametrize("piece", [60, 4096, 5000])
def test_a_shorter_last_piece_is_hashed_like_the_others(piece: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, 3 * piece + 17, dtype=np.uint8)
    expected = [reference(data[i * piece : (i + 1) * piece].tobytes(), piece) for i in range(4)]
    assert hash_pieces(data, piece, 4).tolist() == expected


def test_partition_checksum_sums_over_tensors() -> None:
    specs = (TensorSpec("", "F32", (5, 4)), TensorSpec("m", "F64", (5, 600)))
    group = build_layout([("w", "parameter", specs)], rows={"w": 2}).groups[0]
    data = [np.random.default_rng(t).integers(0, 256, s.nbytes, dtype=np.uint8) for t, s in enumerate(specs)]
    found = partition_checksums(group, 3, data)
    for p in range(3):
        expected = 0
        for t, s in enumerate(specs):
            part = data[t][2 * p * s.row_bytes : min(2 * p + 2, 5) * s.row_bytes].tobytes()
            assert int(tensor_constant(t)) == splitmix64((1 << 32) + t) | 1
            expected += reference(part, 2 * s.row_bytes) * (splitmix64((1 << 32) + t) | 1)
        assert int(found[p]) == expected & M


def test_every_flipped_bit_and_every_swap_shows() -> None:
    row = np.random.default_rng(1).integers(0, 256, (1, 63), dtype=np.uint8)
    flipped = np.repeat(row, 63 * 8, axis=0)
    for i in range(63 * 8):
        flipped[i, i // 8] ^= 1 << i % 8
    hashes = hash_rows(flipped)
    assert len(set(hashes.tolist()) | {int(hash_rows(row)[0])}) == 63 * 8 + 1
    zeros = [int(hash_rows(np.zeros((1, n), np.uint8))[0]) for n in range(100)]
    assert len(set(zeros)) == 100
