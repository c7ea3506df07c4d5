"""Test reading around a damaged record: other copies come back, and nothing that it may have changed is exact."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scarctl.errors import Corruption, NoIntactCopy
from scarctl.recovery.plan import plan_rollback
from scarctl.state.layout import Layout
from scarctl.state.version import step_of
from scarctl.store import Store, create_snapshot, open_writer, read_snapshot, sealed_sets, verify
from scarctl.store import format as store_format
from tests.store.helpers import Data, read_all, record_file

SHARDS = 3


@pytest.fixture
def saved(tmp_path: Path, layout: Layout, data: Data) -> Store:
    """Return a lane: everything sealed at step 1 (record 2), a part at steps 2 and 3 (records 3 and 4)."""
    store = Store.create(tmp_path / "run", shards=SHARDS)
    everything = np.arange(layout.partitions)
    with open_writer(store, layout=layout) as writer:
        writer.commit(everything, data, step=1, sealed=True)
        writer.commit(everything[::2], data, step=2)
        writer.commit(everything[::3], data, step=3)
    return store


def damage(store: Store, k: int, number: int = 1) -> Path:
    path = record_file(store, k, number)
    path.write_bytes(path.read_bytes().replace(b'"created":"2', b'"created":"3', 1))
    return path


def steps(store: Store, layout: Layout) -> list[int]:
    """Check that all bytes can be read, and return the step of every partition."""
    state = store.state(0, around=True)
    found, bad = read_all(store, state)
    assert not bad
    assert len(found) == layout.partitions
    return step_of(state.version).tolist()  # type: ignore[no-any-return]


def test_before_the_newest(saved: Store, layout: Layout) -> None:
    path = damage(saved, 4)
    with pytest.raises(Corruption, match="its checksum does not match") as caught:
        saved.state(0)
    assert "put this file back" in (caught.value.hint or "")
    assert steps(saved, layout) == [2 if i % 2 == 0 else 1 for i in range(layout.partitions)]
    state = saved.state(0, around=True)
    assert state.doubt.all()
    assert state.whole == ""
    assert [(one.k, one.file) for one in state.damaged] == [(4, str(path))]
    assert [(one.epoch, one.step) for one in sealed_sets([state])] == [(1, 1)]
    assert saved.current_layout(around=True) == layout
    with pytest.raises(Corruption, match="its checksum does not match"):
        open_writer(saved, layout=layout)


def test_between_others(saved: Store, layout: Layout) -> None:
    damage(saved, 3)
    later = np.arange(layout.partitions) % 3 == 0
    assert steps(saved, layout) == np.where(later, 3, 1).tolist()
    assert np.array_equal(saved.state(0, around=True).doubt, ~later), "a later record has their newest copies"


def test_a_whole_state_after_it_is_exact(saved: Store, layout: Layout, data: Data) -> None:
    with open_writer(saved, layout=layout) as writer:
        writer.commit(np.arange(layout.partitions), data, step=4, sealed=True)
        damage(saved, 3)
    assert steps(saved, layout) == [4] * layout.partitions
    state = saved.state(0, around=True)
    assert not state.doubt.any()
    assert state.whole
    assert sealed_sets([state])[0].step == 4


def test_not_the_one_that_all_others_need(saved: Store, layout: Layout) -> None:
    """Record 2 has the only table with anything in it: the one before says that nothing was saved."""
    damage(saved, 2)
    assert step_of(saved.state(0, around=True).version).tolist() == [
        max((s for s in (2, 3) if i % s == 0), default=-1) for i in range(layout.partitions)
    ]
    damage(saved, 1)
    with pytest.raises(Corruption, match="its checksum does not match"):
        saved.state(0, around=True)


def test_not_if_all_are_damaged(saved: Store) -> None:
    for k in range(1, 5):
        damage(saved, k)
    for read in (lambda store: store.current_layout(around=True), lambda store: store.state(0, around=True)):
        with pytest.raises(Corruption, match="its checksum does not match"):
            read(saved)


def test_not_what_a_later_version_wrote(saved: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_format, "FORMAT", 0)
    for read in (lambda store: store.current_layout(around=True), lambda store: store.state(0, around=True)):
        with pytest.raises(Corruption, match="newer than this scarctl reads") as caught:
            read(saved)
        assert caught.value.kind == "newer-format"


def test_without_the_newest_file_the_log_goes_on(saved: Store, layout: Layout, data: Data) -> None:
    """As docs/troubleshooting.md says: it is moved out of the store."""
    damage(saved, 4).rename(saved.root.parent / "damaged")
    assert not saved.state(0).doubt.any()
    with open_writer(saved, layout=layout) as writer:
        writer.commit(np.arange(layout.partitions), data, step=4, sealed=True)
    assert verify(saved, read_data=True).problems == []


def test_a_snapshot_whose_own_record_is_damaged_is_not_another_state(saved: Store, layout: Layout) -> None:
    """The older copies that are read around it are all of one step, too."""
    (seal,) = sealed_sets([saved.state(0)])
    snapshot = create_snapshot(saved, "kept", seal)
    with open_writer(saved, layout=layout) as writer:
        writer.commit(np.arange(layout.partitions), Data(layout, 1), step=4, sealed=True)
        create_snapshot(saved, "later", sealed_sets([writer.state])[0])
    later = read_snapshot(saved, "later")
    damage(saved, later.places[0].k, 2)
    assert plan_rollback(saved, layout, saved.shard_of(layout), snapshot=snapshot).step == 1
    with pytest.raises(NoIntactCopy, match="'later' is damaged"):
        plan_rollback(saved, layout, saved.shard_of(layout), snapshot=later)
