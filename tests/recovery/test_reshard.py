"""A table divided by rows, with a slot of its shape and one of a number per row, is divided in another way."""

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

ROWS, COLUMNS = 40, 8
WHOLE = {
    "": np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS),
    "exp_avg": -np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS),
    "sum": np.arange(1000, 1000 + ROWS, dtype=np.float32),
}


def part(start: int, stop: int) -> Layout:
    """The layout of a rank with these rows."""
    shapes = {slot: (stop - start, *array.shape[1:]) for slot, array in WHOLE.items()}
    specs = tuple(TensorSpec(slot, "F32", shape) for slot, shape in shapes.items())
    place = Place((ROWS, COLUMNS), (start, 0)) if stop - start < ROWS else None
    return build_layout([("table", "parameter", specs, place)], rows={"table": 6}, optimizer="fused")


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    """What two ranks have saved: rows 0 to 24, and the others."""
    store = Store.create(tmp_path / "s")
    create_topology(store, Topology(1, (0, 1), "ab" * 32))
    for shard, (start, stop) in enumerate(((0, 25), (25, ROWS))):
        layout, view = part(start, stop), store.of_shard(shard, 1)

        def read(group: int, tensor: int, first: int, last: int, start: int = start) -> memoryview:
            rows = list(WHOLE.values())[tensor][start + first : start + last]
            return memoryview(np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1))

        with open_writer(view, layout=layout) as writer:
            ids = np.arange(layout.partitions)
            writer.commit(shard, ids, read, step=3, sealed=True, whole="ab" * 16, extras={"step": 3})
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
