"""Provide a small model's state for store tests: layout, random bytes, and reading everything back."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scarctl.state.layout import Layout, TensorSpec, build_layout
from scarctl.store import ShardState, Store
from scarctl.util.arrays import Ids


def small_layout() -> Layout:
    """Return a layout of all kinds: rows per partition, short pieces, a scalar, an empty tensor, about 4 KiB."""
    return build_layout(
        [
            ("emb", "parameter", (TensorSpec("", "F32", (37, 3)), TensorSpec("exp_avg", "F64", (37, 3)))),
            (
                "fc.weight",
                "parameter",
                (TensorSpec("", "BF16", (25, 300)), TensorSpec("m", "F8_E5M2", (25, 7))),
            ),
            ("count", "buffer", (TensorSpec("", "I64", ()),)),
            ("odd", "parameter", (TensorSpec("", "U8", (11, 5, 1)),)),
            ("none", "buffer", (TensorSpec("", "F32", (0, 4)),)),
        ],
        rows={"emb": 1, "fc.*": 8, "odd": 3},
        optimizer="AdamW",
    )


class Data:
    """Bytes of a whole state: `data[g][t]` is uint8[rows, row_bytes]. It serves as a segment's source."""

    def __init__(self, layout: Layout, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.layout = layout
        self.tensors = [
            [rng.integers(0, 256, (s.rows, s.row_bytes), dtype=np.uint8) for s in g.tensors]
            for g in layout.groups
        ]

    def __call__(self, group: int, tensor: int, start: int, stop: int) -> memoryview:
        return memoryview(self.tensors[group][tensor][start:stop])

    def change(self, ids: Iterable[int], seed: int) -> None:
        """Draw new random bytes for some partitions."""
        rng = np.random.default_rng(seed)
        for i in ids:
            g, start, stop = place(self.layout, i)
            for array in self.tensors[g]:
                array[start:stop] = rng.integers(0, 256, array[start:stop].shape, dtype=np.uint8)

    def partition(self, i: int) -> bytes:
        g, start, stop = place(self.layout, i)
        return b"".join(array[start:stop].tobytes() for array in self.tensors[g])

    def all(self, ids: Iterable[int]) -> dict[int, bytes]:
        return {i: self.partition(i) for i in ids}


def make_finite(data: NDArray[np.uint8], spec: TensorSpec) -> None:
    """Clear one bit of the exponents in contiguous bytes of a tensor that encodings know: no value is 2 or more."""
    if width := {"F32": 4, "BF16": 2}.get(spec.dtype):
        data.reshape(-1)[width - 1 :: width] &= np.uint8(0xBF)


def place(layout: Layout, i: int) -> tuple[int, int, int]:
    starts, stops = layout.row_ranges(np.array([i]))
    return int(layout.group_of(np.array([i]))[0]), int(starts[0]), int(stops[0])


def read_all(
    store: Store, state: ShardState, ids: Ids | None = None
) -> tuple[dict[int, bytes], dict[int, str]]:
    """Return bytes by partition of the saved members (or of `ids`), and reasons by partition for unreadable ones."""
    bad: list[tuple[Ids, str]] = []
    found: dict[int, bytes] = {}
    assert state.layout is not None
    for batch in store.read(state, state.ids[state.saved] if ids is None else ids, corrupt=bad):
        starts, stops = state.layout.row_ranges(batch.ids)
        row = 0
        for i, rows in zip(batch.ids.tolist(), (stops - starts).tolist(), strict=True):
            assert i not in found
            found[i] = b"".join(t[row : row + rows].tobytes() for t in batch.tensors)
            row += rows
    return found, {int(i): reason for ids_, reason in bad for i in ids_}


def record_file(store: Store, k: int, number: int = 1) -> Path:
    """Return the file of record `k` of a term of lane 0."""
    return store.root / store.log(0).term(number).place(k).path(0)


def summary(state: ShardState) -> dict[str, object]:
    """Return what equal states have in common: segments by name, not by number."""
    names = [s.name for s in state.segments]
    return {
        "seq": state.seq,
        "epoch": state.epoch,
        "step": state.step,
        "digest": state.digest,
        "records": state.records,
        "ids": state.ids.tolist(),
        "version": state.version.tolist(),
        "segment": [names[s] if s >= 0 else None for s in state.segment.tolist()],
        "position": state.position.tolist(),
        "checksum": state.checksum.tolist(),
        "doubt": state.doubt.tolist(),
        "sealed": state.sealed,
        "line": state.line,
        "extras": None if state.extras is None else (state.extras[0], names[state.extras[1]]),
        "layout": None if state.layout is None else state.layout.digest,
    }


def files(folder: Path) -> dict[str, bytes]:
    """Return all files of a store except the lock and temporary files."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "lock" and not path.name.startswith(".tmp-")
    }


def memory_folder() -> Path:
    """Return a new folder, in memory if possible: a killed process leaves the same there, and fsync costs nothing."""
    return Path(
        tempfile.mkdtemp(prefix="scarctl-test-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    )
