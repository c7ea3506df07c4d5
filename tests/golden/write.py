"""Write small stores in the present format: `python -m tests.golden.write FOLDER`.

`one` is of one process; `ranks` of two ranks; `kept` has been collected, and has a snapshot; in `mixed` the part has
copies of two steps; in `renewed` the writer has begun other terms, and one was rolled back. In each the newest state is
of step 6, sealed; before, there were a sealed state of step 3 and a part of step 5. Every byte of a partition's copy is
16 * its step + its id, modulo 256; a rank's ids are its own. `encoded` has other values, and newer copies in bfloat16
and in int8.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from scarctl.state.layout import Layout, TensorSpec, build_layout
from scarctl.store import (
    Collector,
    Store,
    StoreWriter,
    Topology,
    create_snapshot,
    create_topology,
    open_writer,
    sealed_sets,
)
from scarctl.store.encoder import Encoder
from scarctl.util.arrays import Ids

WHOLE, PART, NEWEST = 3, 5, 6


def layout() -> Layout:
    """Return a layout of six partitions: rows with a slot, and a scalar."""
    return build_layout(
        [
            ("w", "parameter", (TensorSpec("", "F32", (10, 2)), TensorSpec("m", "BF16", (10, 2)))),
            ("count", "buffer", (TensorSpec("", "I64", ()),)),
        ],
        rows={"w": 2},
        optimizer="SGD",
    )


def byte_of(partition: int, step: int) -> int:
    """Return the value of every byte of a copy."""
    return (16 * step + partition) % 256


class Source:
    """A state of one step."""

    def __init__(self, step: int) -> None:
        self._layout, self._step = layout(), step

    def __call__(self, group: int, tensor: int, start: int, stop: int) -> memoryview:
        spec, first = self._layout.groups[group].tensors[tensor], int(self._layout.base[group])
        rows = np.arange(start, stop) // self._layout.groups[group].rows_per_partition
        values = (16 * self._step + first + rows) % 256
        return memoryview(np.repeat(values.astype(np.uint8), spec.row_bytes).reshape(-1, spec.row_bytes))


def _save(writers: list[StoreWriter], step: int, ids: Ids | None = None) -> None:
    """Save one checkpoint: of the whole state, sealed, or of some partitions."""
    extras: dict[str, int] | None = {"step": step}
    for writer in writers:
        own = writer.state.ids
        mine = own if ids is None else np.intersect1d(own, ids)
        whole = f"{step:032x}" if ids is None else ""
        writer.commit(mine, Source(step), step=step, sealed=ids is None, whole=whole, extras=extras)


class Steps:
    """A state in which every partition is of its own step."""

    def __init__(self, steps: dict[int, int]) -> None:
        self._layout, self._steps = layout(), steps

    def __call__(self, group: int, tensor: int, start: int, stop: int) -> memoryview:
        of_group = self._layout.groups[group]
        first = int(self._layout.base[group]) + start // of_group.rows_per_partition
        parts = []
        for i in range(first, first + -(-(stop - start) // of_group.rows_per_partition)):
            at = (i - int(self._layout.base[group])) * of_group.rows_per_partition
            until = min(at + of_group.rows_per_partition, stop)
            parts.append(bytes(Source(self._steps[i])(group, tensor, at, until)))
        return memoryview(b"".join(parts))


def _one_process(folder: Path, *, collect: bool = False, mixed: bool = False, renew: bool = False) -> None:
    store = Store.create(folder)
    with open_writer(store, layout=layout()) as writer:
        _save([writer], WHOLE)
        if collect:
            create_snapshot(store, "first", sealed_sets([writer.state])[0])
        if mixed:
            steps = {0: PART - 1, 1: PART, 2: PART - 1}
            writer.commit(
                np.arange(3),
                Steps(steps),
                step=PART,
                steps=np.array(list(steps.values())),
                extras={"step": PART},
            )
        else:
            _save([writer], PART, np.arange(3))
        if renew:
            writer.renew()
            writer.roll_back(writer.state.sealed[0].seq)
            writer.repeat()
        _save([writer], NEWEST)
        if collect:
            Collector(writer, floor=0).collect()
    store.close()


def _ranks(folder: Path) -> None:
    store = Store.create(folder)
    create_topology(store, Topology(1, (0, 1), "ab" * 32))
    views = [store.of_shard(rank) for rank in range(2)]
    writers = [open_writer(view, layout=layout()) for view in views]
    _save(writers, WHOLE)
    _save(writers[:1], PART, np.arange(3))
    _save(writers, NEWEST)
    for writer in writers:
        writer.close()


def encoded_layout() -> Layout:
    """Return a layout of four partitions of float32 rows with a slot, wide enough for a scale."""
    specs = (TensorSpec("", "F32", (8, 8)), TensorSpec("exp_avg_sq", "F32", (8, 8)))
    return build_layout([("w", "parameter", specs)], rows={"w": 2}, optimizer="Adam")


def ramp(group: int, tensor: int, start: int, stop: int) -> memoryview:
    """Return rows of `encoded_layout`: thirds, which no encoding represents; of both signs in the parameter."""
    values = np.arange(8 * start, 8 * stop, dtype=np.float32) - np.float32(0 if tensor else 20)
    return memoryview((values / np.float32(3)).tobytes())


def _encoded(folder: Path) -> None:
    store = Store.create(folder)
    ids = np.arange(4)
    with open_writer(store, layout=encoded_layout()) as writer:
        writer.commit(ids, ramp, step=WHOLE, sealed=True)
        for step, (encoding, own) in enumerate([("bfloat16", ids[:2]), ("int8", ids[2:])], PART):
            encoder = Encoder(encoded_layout(), encoding, ramp, own)  # type: ignore[arg-type]
            writer.commit(own, encoder, step=step, extras={"step": step})


def main(folder: Path) -> None:
    """Write all of them into a folder."""
    _one_process(folder / "one")
    _one_process(folder / "kept", collect=True)
    _one_process(folder / "mixed", mixed=True)
    _one_process(folder / "renewed", renew=True)
    _ranks(folder / "ranks")
    _encoded(folder / "encoded")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
