"""Test rows of partitions in one buffer: rows read from one arena and written to another are the same state."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scarctl.arena.arena import Arena
from scarctl.arena.rows import Gathered, copy_rows, read_rows, write_rows
from tests.arena.arenas import ALL, LAYOUT, create
from tests.daemon.rig import STORE_ID, fill, values


@given(chosen=st.sets(st.sampled_from(ALL.tolist())), new=st.booleans())
def test_chosen_rows_arrive_and_no_others(chosen: set[int], new: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _arrive(Path(folder), chosen, new)


def _arrive(folder: Path, chosen: set[int], new: bool) -> None:
    ids = np.array(sorted(chosen), dtype=np.int64)
    source = create(folder / "source")
    target = Arena.create(folder / "target", LAYOUT, run_id=STORE_ID, epoch=1, populate=False, sparse=new)
    for partition in ALL.tolist():
        fill(source, np.array([partition]), partition + 1)
    buffer = np.full(LAYOUT.nbytes + 5, 250, np.uint8)
    data = read_rows(source.slot, ids, buffer)
    assert data.size == int(LAYOUT.partition_bytes[ids].sum())
    assert set(buffer[data.size :].tolist()) == {250}, "nothing is written behind them"
    write_rows(target.slot, ids, data.copy(), target.folder / "arena" if new else None)
    target.reserve_rows()
    for partition in ALL.tolist():
        if LAYOUT.partition_bytes[partition]:
            assert values(target, partition) == {partition + 1 if partition in chosen else 0}
    source.close()
    target.close()


def test_gathered_rows_are_those_of_the_slot(tmp_path: Path) -> None:
    source = create(tmp_path / "source")
    for partition in ALL.tolist():
        fill(source, np.array([partition]), partition + 1)
    ids = ALL[1::2]
    rows = Gathered(source.slot, ids)
    for i, g, start, stop in zip(
        ids.tolist(),
        LAYOUT.group_of(ids).tolist(),
        *(found.tolist() for found in LAYOUT.row_ranges(ids)),
        strict=True,
    ):
        for t in range(len(LAYOUT.groups[g].tensors)):
            assert bytes(rows(g, t, start, stop)) == bytes(source.slot.source(g, t, start, stop)), i
    source.close()


def test_rows_go_from_one_slot_into_the_other(tmp_path: Path) -> None:
    arena = create(tmp_path / "arena")
    fill(arena.slot, ALL, 3)
    copy_rows(arena.slot, arena.spare, ALL[1:4])
    found = [values(arena.spare, i) for i in ALL.tolist() if LAYOUT.partition_bytes[i]]
    wanted = [{3 if i in (1, 2, 3) else 0} for i in ALL.tolist() if LAYOUT.partition_bytes[i]]
    assert found == wanted
    arena.close()
