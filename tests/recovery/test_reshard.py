"""Test another division of a table by rows, with a slot of its shape and a slot of one number per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from scarctl.errors import LayoutMismatch
from scarctl.recovery.reshard import Parts, check_fits, find_parts, with_slots
from scarctl.state.group import Group, Place, TensorSpec
from scarctl.state.layout import Layout, build_layout
from scarctl.store import Store, Topology, create_topology, open_writer
from scarctl.store.encoder import Encoder

ROWS, COLUMNS = 40, 8
WHOLE = {
    "": np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS),
    "exp_avg": -np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS),
    "sum": np.arange(1000, 1000 + ROWS, dtype=np.float32),
}


def part(start: int, stop: int) -> Layout:
    """Return the layout of a rank with these rows."""
    shapes = {slot: (stop - start, *array.shape[1:]) for slot, array in WHOLE.items()}
    specs = tuple(TensorSpec(slot, "F32", shape) for slot, shape in shapes.items())
    place = Place((ROWS, COLUMNS), (start, 0)) if stop - start < ROWS else None
    return build_layout([("table", "parameter", specs, place)], rows={"table": 6}, optimizer="fused")


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    """Return what two ranks have saved: rows 0 to 24, and the others."""
    store = Store.create(tmp_path / "s")
    create_topology(store, Topology(1, (0, 1), "ab" * 32))
    for shard, (start, stop) in enumerate(((0, 25), (25, ROWS))):
        layout, view = part(start, stop), store.of_shard(shard)

        def read(group: int, tensor: int, first: int, last: int, start: int = start) -> memoryview:
            rows = list(WHOLE.values())[tensor][start + first : start + last]
            return memoryview(np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1))

        with open_writer(view, layout=layout) as writer:
            ids = np.arange(layout.partitions)
            writer.commit(ids, read, step=3, sealed=True, whole="ab" * 16, extras={"step": 3})
    found = find_parts(store)
    assert found is not None
    return found


@pytest.mark.parametrize("bounds", [(0, ROWS), (0, 7, 25, ROWS), (0, 13, 30, ROWS)])
def test_every_row_comes_back_with_its_number(parts: Parts, bounds: Sequence[int]) -> None:
    for start, stop in pairwise(bounds):
        layout = part(start, stop)
        found = [np.zeros((spec.rows, spec.row_bytes), np.uint8) for spec in layout.groups[0].tensors]
        parts.copy_into(layout, lambda g, t, found=found: found[t])
        for spec, data in zip(layout.groups[0].tensors, found, strict=True):
            values = data.reshape(-1).view(np.float32).reshape(spec.shape)
            assert np.array_equal(values, WHOLE[spec.slot][start:stop]), spec.slot


@pytest.mark.parametrize("bounds", [(0, ROWS), (0, 13, 30, ROWS)])
def test_encoded_rows_are_decoded_and_of_no_whole_state(parts: Parts, bounds: Sequence[int]) -> None:
    """The second rank has saved its rows again, in bfloat16: restored values are rounded, and not a whole state."""
    assert parts.whole == "ab" * 16
    store, layout = parts.store, part(25, ROWS)

    def read(group: int, tensor: int, first: int, last: int) -> memoryview:
        rows = (list(WHOLE.values())[tensor] * np.float32(1.001))[25 + first : 25 + last]
        return memoryview(np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1))

    with open_writer(store.of_shard(1), layout=layout) as writer:
        ids = np.arange(layout.partitions)
        writer.commit(ids, Encoder(layout, "bfloat16", read, ids), step=3, extras={"step": 3})
    found = find_parts(Store.open(store.root))
    assert found is not None
    assert found.whole == ""
    sealed = find_parts(Store.open(store.root), sealed=True)
    assert sealed is not None
    assert sealed.whole == "ab" * 16
    for start, stop in pairwise(bounds):
        new = part(start, stop)
        rows = [np.zeros((spec.rows, spec.row_bytes), np.uint8) for spec in new.groups[0].tensors]
        found.copy_into(new, lambda g, t, rows=rows: rows[t])
        for spec, data in zip(new.groups[0].tensors, rows, strict=True):
            values, wanted = data.reshape(-1).view(np.float32).reshape(spec.shape), WHOLE[spec.slot].copy()
            wanted[25:] *= np.float32(1.001)
            error = np.abs(values - wanted[start:stop])
            assert (error <= 2.0**-8 * np.abs(wanted[start:stop])).all()
            if stop > 25 and spec.slot != "sum":
                assert error.any()
            if stop <= 25:
                assert not error.any()


def test_slots_are_of_the_new_part(parts: Parts) -> None:
    bare = replace(part(3, 9).groups[0], tensors=part(3, 9).groups[0].tensors[:1])
    shapes = {spec.slot: spec.shape for spec in with_slots(parts, bare)}
    assert shapes == {"": (6, COLUMNS), "exp_avg": (6, COLUMNS), "sum": (6,)}


def test_slots_of_another_form_are_refused(parts: Parts) -> None:
    def fits(*slots: TensorSpec) -> None:
        group = part(0, ROWS).groups[0]
        check_fits(parts, [replace(group, tensors=(group.tensors[0], *slots))], ["table"], "fused")

    group: Group = part(0, ROWS).groups[0]
    fits()
    fits(*group.tensors[1:])
    with pytest.raises(LayoutMismatch, match="'table/sum' has another form"):
        fits(TensorSpec("sum", "F32", (ROWS, COLUMNS)))
    with pytest.raises(LayoutMismatch, match="'table/momentum' new"):
        fits(TensorSpec("momentum", "F32", (ROWS, COLUMNS)))
