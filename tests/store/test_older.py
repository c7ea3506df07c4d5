"""Test that the newest copies before a step are found, whatever was saved or sealed after it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from scarctl.state.version import step_of
from scarctl.store import Store
from scarctl.store.format import segment_path
from scarctl.store.older import state_before
from scarctl.store.writer import StoreWriter
from tests.store.helpers import Data, read_all

IDS = np.array([3, 4, 5])


def at(store: Store, step: int, ids: np.ndarray = IDS) -> tuple[list[int], dict[int, bytes]]:  # type: ignore[type-arg]
    """Return the steps of the copies that are found, and their bytes, all verified."""
    found = state_before(store.log(0), store.state(0), ids, step)
    copies, damaged = read_all(store, found)
    assert not damaged
    return step_of(found.version).tolist(), copies


def test_the_newest_copies_of_a_step_or_earlier(store: Store, writer: StoreWriter, data: Data) -> None:
    saved: list[dict[int, bytes]] = []
    for step in range(4):
        data.change(range(10), 10 * step)
        writer.commit(IDS if step else np.arange(10), data, step=10 * step)
        saved.append(data.all(IDS.tolist()))
    for step, number in ((30, 3), (29, 2), (20, 2), (15, 1), (0, 0)):
        assert at(store, step) == ([10 * number] * 3, saved[number])
    assert at(store, 25, np.array([3, 9]))[0] == [20, 0]


def test_none_is_found_where_all_are_later(store: Store, writer: StoreWriter, data: Data) -> None:
    writer.commit(np.arange(10), data, step=7)
    found = state_before(store.log(0), store.state(0), IDS, 6)
    assert found.version.tolist() == [-1, -1, -1]
    assert not found.doubt.any()


def test_a_later_seal_does_not_hide_a_copy_that_it_found_unchanged(
    store: Store, writer: StoreWriter, data: Data
) -> None:
    everything = writer.state.ids
    writer.commit(everything, data, step=2)
    old = data.all(IDS.tolist())
    writer.commit(np.array([0]), data, step=5, sealed=True)
    data.change(range(10), 9)
    writer.commit(np.array([3]), data, step=9, sealed=True)
    steps, copies = at(store, 6)
    assert steps == [5, 5, 5]  # the seal of step 5 has found them unchanged
    assert copies == old
    assert at(store, 4) == ([2, 2, 2], old)
    assert at(store, 8) == ([5, 5, 5], old)


def test_damage_in_between_leaves_a_doubt(store: Store, writer: StoreWriter, data: Data) -> None:
    writer.commit(np.arange(10), data, step=1)
    first = data.all(IDS.tolist())
    data.change(range(10), 2)
    middle = writer.commit(IDS, data, step=2)
    data.change(range(10), 3)
    writer.commit(IDS, data, step=3)
    assert middle.segment is not None
    (Path(store.root) / segment_path(0, middle.segment.name)).write_bytes(b"")
    found = state_before(store.log(0), writer.state, IDS, 2)
    assert step_of(found.version).tolist() == [1, 1, 1]
    assert found.doubt.all()
    assert read_all(store, found) == (first, {})
