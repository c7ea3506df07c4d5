"""Test rows of partitions in one buffer: rows read from one arena and written to another are the same state."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scarctl.arena.arena import Arena
from scarctl.arena.rows import read_rows, write_fields, write_rows
from scarctl.state.version import pack
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
    data = read_rows(source, ids, buffer)
    assert data.size == int(LAYOUT.partition_bytes[ids].sum())
    assert set(buffer[data.size :].tolist()) == {250}, "nothing is written behind them"
    write_rows(target, ids, data.copy(), sparse=new)
    target.reserve_rows()
    for partition in ALL.tolist():
        if LAYOUT.partition_bytes[partition]:
            assert values(target, partition) == {partition + 1 if partition in chosen else 0}
    source.close()
    target.close()


def test_fields_end_the_copy_that_was_begun(tmp_path: Path) -> None:
    source, target = create(tmp_path / "source"), create(tmp_path / "target")
    source.begin(ALL)
    source.end(ALL, pack(1, 3))
    source.acknowledge(ALL[::2], pack(1, 3))
    some = ALL[1:4]
    target.begin(some)
    assert not target.intact()[some].any()
    write_fields(
        target,
        some,
        source.version[some],
        source.durable[some],
        source.distance[some],
        source.generation[some],
    )
    assert target.intact()[some].all()
    assert target.version[some].tolist() == [pack(1, 3)] * some.size
    assert target.pending()[some].tolist() == source.pending()[some].tolist()
    source.close()
    target.close()
