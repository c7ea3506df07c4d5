"""Test copies that are read from the store into the memory of an arena, and verified there."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.errors import NoIntactCopy
from scarctl.recovery.execute import SlotSink, execute
from scarctl.recovery.plan import Plan, plan_partial
from scarctl.recovery.report import Report
from scarctl.state.layout import TensorSpec, build_layout
from scarctl.state.version import pack
from scarctl.store import Store, open_writer
from scarctl.util.arrays import Ids
from tests.recovery.test_plan import values

LAYOUT = build_layout(
    [
        ("wide", "parameter", (TensorSpec("", "F32", (70, 1030)), TensorSpec("m", "BF16", (70, 1030)))),
        ("small", "parameter", (TensorSpec("", "F32", (11, 3)),)),
        ("none", "parameter", (TensorSpec("", "F32", (4, 0)),)),
        ("one", "buffer", (TensorSpec("", "I64", ()),)),
    ],
    rows={"wide": 8, "small": 2},
)
EVERYTHING = np.arange(LAYOUT.partitions)
RUN = "ab" * 16
SHARD_OF = np.zeros(LAYOUT.partitions, dtype=np.int32)


class Saved:
    """A store with one commit of the whole state per entry of `values`."""

    def __init__(self, folder: Path, commits: int = 1) -> None:
        self.store = Store.create(str(folder / "store"))
        random = np.random.default_rng(3)
        self.values: list[list[bytes]] = []
        with open_writer(self.store, layout=LAYOUT) as writer:
            self.epoch = writer.epoch
            for step in range(commits):
                live = Arena.anonymous(LAYOUT)
                live.memory()[:] = random.integers(0, 255, live.memory().size, np.uint8)
                writer.commit(EVERYTHING, live.slot.source, step=step)
                self.values.append(bytes_of(live))

    def plan(self, arena: Arena) -> Plan:
        return plan_partial(EVERYTHING, LAYOUT, SHARD_OF, self.store.state(0), arena)

    def segments(self) -> list[Path]:
        """Return the segments with data, oldest first."""
        found = [f for f in (self.store.root / "lanes/0/seg").iterdir() if f.stat().st_size > LAYOUT.nbytes]
        return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def bytes_of(arena: Arena) -> list[bytes]:
    """Return the bytes of every partition."""
    return [values(arena, i) for i in EVERYTHING.tolist()]


def damage(path: Path, partition: int) -> None:
    """Change one byte of the first tensor's data of this partition of the group "wide"."""
    data = bytearray(path.read_bytes())
    head = 8 + int.from_bytes(data[:8], "little")
    start = json.loads(data[8:head])["wide"]["data_offsets"][0]
    data[head + start + partition * 8 * 1030 * 4 + 5] ^= 1
    path.write_bytes(data)


def restore(saved: Saved, arena: Arena, sink: SlotSink) -> Report:
    """Restore everything, and make it the arena's state."""
    report = execute(saved.plan(arena), saved.store, arena, sink)
    assert (report.plan.ids == EVERYTHING).all()
    sink.settle(report.plan, "")
    return report


class Watched(SlotSink):
    """Counts the partitions whose data were in the arena before `put`."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self.straight: list[int] = []

    def put(self, group: int, ids: Ids, versions: Ids, tensors: Sequence[NDArray[np.uint8]]) -> None:
        assert self.arena is not None
        if all(np.may_share_memory(self.arena.memory(), data) for data in tensors):
            self.straight += ids.tolist()
        super().put(group, ids, versions, tensors)


def test_what_has_no_copy_is_read_straight_into_its_place(tmp_path: Path) -> None:
    saved, arena = Saved(tmp_path), Arena.anonymous(LAYOUT, slots=2)
    sink = Watched(arena)
    restore(saved, arena, sink)
    full = [i for i in EVERYTHING.tolist() if LAYOUT.partition_bytes[i]]
    assert set(full) <= set(sink.straight)
    assert bytes_of(arena) == saved.values[0]
    assert arena.intact().all()


def test_an_intact_copy_is_never_read_over(tmp_path: Path) -> None:
    saved, arena = Saved(tmp_path, commits=2), Arena.anonymous(LAYOUT, slots=2)
    kept = EVERYTHING[:4]
    for t in range(2):
        arena.rows(0, t)[:32] = 7
    arena.slot.end(kept, pack(saved.epoch, 0), 1)
    before = bytes_of(arena)
    for path in saved.segments():
        damage(path, 2)
    report = restore(saved, arena, Watched(arena))
    after = bytes_of(arena)
    assert after[2] == before[2]
    assert [after[i] for i in EVERYTHING.tolist() if i != 2] == [
        saved.values[1][i] for i in EVERYTHING.tolist() if i != 2
    ]
    assert (report.tiers["memory"], report.degraded) == (1, True)


def test_a_damaged_copy_that_was_read_into_the_arena_is_no_copy(tmp_path: Path) -> None:
    saved, arena = Saved(tmp_path), Arena.anonymous(LAYOUT, slots=2)
    damage(saved.segments()[0], 3)
    with pytest.raises(NoIntactCopy, match=r"wide\[24:32\]"):
        execute(saved.plan(arena), saved.store, arena, SlotSink(arena))
    assert not arena.intact().any()
    assert not arena.spare.intact()[3]
    arena.flip(arena.spare, 1, pack(saved.epoch, 0), "")
    wrong = [i for i in np.flatnonzero(arena.intact()) if bytes_of(arena)[i] != saved.values[0][i]]
    assert not wrong


def test_a_cut_file_is_an_error_and_no_copy(tmp_path: Path) -> None:
    saved, arena = Saved(tmp_path), Arena.anonymous(LAYOUT, slots=2)
    plan = saved.plan(arena)
    path = saved.segments()[0]
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(NoIntactCopy):
        execute(plan, saved.store, arena, SlotSink(arena))
    assert not arena.intact().any()


class Failing(SlotSink):
    """Fails when the first partitions arrive."""

    def put(self, group: int, ids: Ids, versions: Ids, tensors: Sequence[NDArray[np.uint8]]) -> None:
        raise OSError("no")


def test_nobody_reads_into_the_arena_after_a_failure(tmp_path: Path) -> None:
    saved, arena = Saved(tmp_path), Arena.anonymous(LAYOUT, slots=2)
    saved.store.blobs.batch = 1 << 15  # type: ignore[misc]  # many units
    began: list[int] = []

    class Slow(Failing):
        def room(self, group: int, ids: Ids) -> Sequence[NDArray[np.uint8]] | None:
            began.append(threading.get_ident())
            return super().room(group, ids)

    with pytest.raises(OSError, match="no"):
        execute(saved.plan(arena), saved.store, arena, Slow(arena))
    before, count = arena.memory().copy(), len(began)
    time.sleep(0.1)
    assert len(began) == count
    assert (arena.memory() == before).all()
    assert not arena.intact().any()


def new_arena(tmp_path: Path) -> Arena:
    """Return a new arena that is about to be filled, on the host's shared memory if possible."""
    return Arena.create(tmp_path / "arena", LAYOUT, run_id=RUN, epoch=1, populate=False)


def slots_of_wide() -> dict[tuple[int, int], NDArray[np.uint8]]:
    return {(0, 1): np.zeros((70, 1030 * 2), np.uint8)}


def test_a_new_arena_is_filled_through_its_file(tmp_path: Path) -> None:
    saved, arena = Saved(tmp_path), new_arena(tmp_path)
    assert arena.is_filling == (sys.platform == "linux")
    restore(saved, arena, Watched(arena))
    assert bytes_of(arena) == saved.values[0]
    assert arena.intact().all()
    arena.end_filling()
    assert not arena.is_filling
    arena.put_rows(arena.slot, 1, 0, slice(2, 4), np.full((2, 12), 7, np.uint8))
    arena.close()
    again = Arena.open_existing(tmp_path / "arena", run_id=RUN)
    assert again is not None
    assert (again.rows(1, 0)[2:4] == 7).all()
    assert bytes_of(again)[:9] == saved.values[0][:9]
    again.remove()


def test_a_closed_arena_keeps_no_file_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    arena = new_arena(tmp_path)
    arena.remove()
    # The map keeps a descriptor of its own until it is collected.
    assert len(os.listdir("/proc/self/fd") if before else []) <= len(before) + 1
    assert not arena.is_filling


@pytest.mark.parametrize("new", [True, False])
def test_new_slots_are_read_straight_into_and_the_arena_has_them_too(tmp_path: Path, new: bool) -> None:
    saved = Saved(tmp_path)
    arena = new_arena(tmp_path) if new else Arena.anonymous(LAYOUT, slots=2)
    slots = slots_of_wide()
    sink = SlotSink(arena, slots)
    (_, straight) = sink.room(0, EVERYTHING[2:4]) or (None, None)
    assert straight is not None
    assert np.may_share_memory(straight, slots[0, 1][16:32])
    restore(saved, arena, sink)
    assert bytes_of(arena) == saved.values[0]
    assert (slots[0, 1] == arena.rows(0, 1)).all()
    assert (sink.written == arena.moments).all()
    arena.remove()


def test_a_damaged_copy_in_a_slot_is_replaced_by_the_older_one(tmp_path: Path) -> None:
    saved, arena, slots = Saved(tmp_path, commits=2), new_arena(tmp_path), slots_of_wide()
    damage(saved.segments()[1], 3)
    report = restore(saved, arena, SlotSink(arena, slots))
    assert report.degraded
    assert bytes_of(arena) == [saved.values[0 if i == 3 else 1][i] for i in EVERYTHING.tolist()]
    assert (slots[0, 1] == arena.rows(0, 1)).all()
    arena.remove()


def test_what_was_never_put_is_not_called_written(tmp_path: Path) -> None:
    saved, arena = Saved(tmp_path), new_arena(tmp_path)
    damage(saved.segments()[0], 3)
    sink = SlotSink(arena, slots_of_wide())
    with pytest.raises(NoIntactCopy):
        execute(saved.plan(arena), saved.store, arena, sink)
    assert sink.written[3] == 0
    assert not arena.intact()[3]
    arena.remove()
