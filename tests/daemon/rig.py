"""Make a small state whose every byte shows at which step it was copied, with a real arena and store."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from scarctl.arena.arena import Arena
from scarctl.arena.extras import carry_extras, write_extras
from scarctl.arena.slot import Slot
from scarctl.persist.persister import Persister
from scarctl.state.layout import Layout, TensorSpec, build_layout
from scarctl.state.version import pack, step_of
from scarctl.store import Store, open_writer, verify
from scarctl.util.arrays import Ids
from tests.support.faulty import FaultyBlobs

STORE_ID = "0123456789abcdef" * 2


def small_layout(rows: int = 40) -> Layout:
    """Return a layout with rows of odd sizes, an optimizer slot of another dtype, an empty tensor and a scalar."""
    return build_layout(
        [
            ("a", "parameter", (TensorSpec("", "F32", (rows, 3)), TensorSpec("m", "BF16", (rows, 3)))),
            ("empty", "parameter", (TensorSpec("", "F32", (0, 4)),)),
            ("b", "buffer", (TensorSpec("", "U8", (rows, 7)),)),
            ("scalar", "parameter", (TensorSpec("", "F64", ()),)),
        ],
        rows={"a": 4, "b": 5},
    )


def fill(slot: Arena | Slot, ids: Ids, value: int) -> None:
    """Write `value` into every byte of the partitions, in a slot, or in an arena's current one."""
    groups = slot.layout.group_of(ids)
    for g, start, stop in zip(
        groups.tolist(), *(x.tolist() for x in slot.layout.row_ranges(ids)), strict=True
    ):
        for t in range(len(slot.layout.groups[g].tensors)):
            slot.rows(g, t)[start:stop] = value % 251


def copy_into(
    arena: Arena,
    ids: Ids,
    version: int,
    value: int,
    *,
    whole: str = "",
    extras: Any = None,
    flush: bool = False,
) -> bool:
    """Make a memory checkpoint in which these partitions have changed. Return False if it is left out.

    extras: None keeps those of the checkpoint before.
    """
    begun = arena.begin_moment(flush=flush)
    if begun is None:
        return False
    slot, moment = begun
    arena.carry(np.delete(np.arange(arena.layout.partitions), ids))
    slot.begin(ids)
    fill(slot, ids, value)
    slot.end(ids, version, moment)
    if extras is None:
        if arena._folder is not None:
            carry_extras(arena, moment)
    else:
        write_extras(arena.folder, slot.number, moment, extras)
    arena.flip(slot, moment, version, whole)
    return True


def acknowledge(arena: Arena, ids: Ids) -> None:
    """Note that the store has the current copies of these partitions."""
    arena.acknowledge(ids, arena.version[ids], arena.moments[ids])


def values(arena: Arena | Slot, partition: int) -> set[int]:
    """Return the byte values in a partition: one, unless it is torn."""
    g = int(arena.layout.group_of([partition])[0])
    (start,), (stop,) = arena.layout.row_ranges([partition])
    found: set[int] = set()
    for t in range(len(arena.layout.groups[g].tensors)):
        found |= set(np.unique(arena.rows(g, t)[start:stop]).tolist())
    return found


class Rig:
    """The saving side of a session."""

    def __init__(
        self,
        folder: Path,
        arena_base: Path,
        *,
        shards: int = 3,
        layout: Layout | None = None,
    ) -> None:
        self.layout = layout or small_layout()
        self.store = Store.create(folder, shards=shards)
        self.blobs = FaultyBlobs(self.store.blobs)
        self.store.blobs = self.blobs  # type: ignore[assignment]
        self.shard_of = self.layout.shards(shards, 0)
        self.everything = np.arange(self.layout.partitions)
        self.writer = open_writer(self.store, layout=self.layout)
        place = arena_base / "run" / self.store.run_id
        found = Arena.open_existing(place, run_id=self.store.run_id)
        self.arena = found or Arena.create(
            place, self.layout, run_id=self.store.run_id, epoch=self.writer.epoch
        )
        self.arena.begin_epoch(self.writer.epoch, again=True)
        self.persister = Persister(self.arena, self.writer)

    def version(self, step: int) -> int:
        return pack(self.writer.epoch, step)

    def copy(
        self, ids: Ids, step: int, value: int | None = None, *, whole: str = "", flush: bool = False
    ) -> None:
        """Make a memory checkpoint, with the step as extras."""
        value = step if value is None else value
        extras = {"step": step}
        assert copy_into(self.arena, ids, self.version(step), value, whole=whole, extras=extras, flush=flush)

    def save(self, ids: Ids, step: int, *, sealed: bool = False, value: int | None = None) -> int:
        """Make a memory checkpoint, and ask for it; return the request's number. sealed: for all, as of one state."""
        self.copy(ids, step, value, whole=uuid.uuid4().hex if sealed else "")
        return self.arena.ask(whole=True) if sealed else self.arena.ask(ids=ids)

    def persist(self, number: int) -> int:
        return self.persister.persist(number)

    def stored(self) -> tuple[Ids, Ids]:
        """Return step and byte value of every partition in the store, read by a new reader; -1: no copy."""
        store = Store.open(str(self.store.root))
        steps, content = np.full(self.layout.partitions, -1), np.full(self.layout.partitions, -1)
        for shard in store.shards():
            state = store.state(shard)
            steps[state.ids] = step_of(state.version)
            corrupt: list[tuple[Ids, str]] = []
            for batch in store.read(state, state.ids[state.saved], corrupt=corrupt):
                at = 0
                for i, start, stop in zip(batch.ids, *self.layout.row_ranges(batch.ids), strict=True):
                    rows = [t[at : at + stop - start] for t in batch.tensors]
                    at += int(stop - start)
                    found = {int(v) for r in rows for v in np.unique(r)}
                    assert len(found) == 1, f"{self.layout.name(int(i))} is torn in the store: {found}"
                    content[i] = found.pop()
            assert corrupt == []
        return steps, content

    def sealed(self) -> set[int]:
        """Return the sealed steps."""
        store = Store.open(str(self.store.root))
        return {seal.step for seal in store.state(0).sealed}

    def extras(self) -> Any:
        """Return the newest extras in the store."""
        store = Store.open(str(self.store.root))
        found = [e for s in store.shards() if (e := store.read_extras(store.state(s))) is not None]
        return max(found, key=lambda e: e[0])[1] if found else None

    def records(self) -> int:
        """Return the number of commits."""
        return sum(r.commits for s in self.store.shards() for r in self.store.log(s).records())

    def die(self) -> None:
        """Release everything as a killed process does: the arena stays."""
        self.arena.close()
        self.writer.close()
        self.store.close()

    def close(self, *, killed: bool = False) -> None:
        """End cleanly. The store must be intact, and have no file that no record names.

        killed: a process was killed before, and may have left such a file.
        """
        self.arena.remove()
        self.writer.close()
        self.store.close()
        store = Store.open(str(self.store.root))
        assert verify(store, read_data=True).problems == []
        named = {r.segment.name for s in store.shards() for r in store.log(s).records() if r.segment}
        lying = {name for folder, _, names in os.walk(store.root) if folder.endswith("seg") for name in names}
        assert killed or lying <= named  # a record may outlive its segment
