"""Test reading around a damaged record: other copies come back, and nothing that it may have changed is exact."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scarctl.errors import Corruption, NoIntactCopy
from scarctl.recovery.plan import plan_rollback
from scarctl.recovery.shared_plan import plans_back
from scarctl.recovery.shares import open_shares
from scarctl.state.layout import Layout
from scarctl.state.version import step_of
from scarctl.store import Store, create_snapshot, open_writer, read_snapshot, sealed_sets, verify
from scarctl.store import format as store_format
from scarctl.store.around import layout_around, state_around, states_around
from scarctl.store.format import index_path, record_path
from scarctl.store.snapshot import lost_seals
from tests.store.helpers import Data, read_all
from tests.support.log_per_shard import store_with_a_log_per_shard

SHARDS = 3


@pytest.fixture
def saved(tmp_path: Path, layout: Layout, data: Data) -> Store:
    """Return one log: everything sealed at step 1 (record 1), a part at steps 2 and 3 (records 2 and 3)."""
    store = Store.create(tmp_path / "run", shards=SHARDS)
    everything = np.arange(layout.partitions)
    with open_writer(store, layout=layout) as writer:
        writer.commit(0, everything, data, step=1, sealed=True)
        writer.commit(0, everything[::2], data, step=2)
        writer.commit(0, everything[::3], data, step=3)
    without_indexes(store)
    return store


def without_indexes(store: Store) -> None:
    for index in (store.root / "shards/0/index").iterdir():
        index.unlink()


def damage(store: Store, seq: int) -> Path:
    path = store.root / record_path(0, seq)
    path.write_bytes(path.read_bytes().replace(b'"created":"2', b'"created":"3', 1))
    return path


def steps(store: Store, layout: Layout) -> list[int]:
    """Check that all bytes can be read, and return the step of every partition."""
    state = state_around(store, 0)
    found, bad = read_all(store, state)
    assert not bad
    assert len(found) == layout.partitions
    return step_of(state.version).tolist()  # type: ignore[no-any-return]


def test_before_the_newest(saved: Store, layout: Layout) -> None:
    path = damage(saved, 3)
    with pytest.raises(Corruption, match="its checksum does not match") as caught:
        saved.state(0)
    assert "put this file back" in (caught.value.hint or "")
    assert steps(saved, layout) == [2 if i % 2 == 0 else 1 for i in range(layout.partitions)]
    state = state_around(saved, 0)
    assert state.doubt.all()
    assert state.whole == ""
    assert [(one.seq, one.file) for one in state.damaged] == [(3, str(path))]
    assert [(one.epoch, one.step) for one in sealed_sets([state])] == [(1, 1)]
    assert layout_around(saved) == layout
    with pytest.raises(Corruption, match="its checksum does not match"):
        open_writer(saved, layout=layout)


def test_between_others(saved: Store, layout: Layout) -> None:
    damage(saved, 2)
    later = np.arange(layout.partitions) % 3 == 0
    assert steps(saved, layout) == np.where(later, 3, 1).tolist()
    assert np.array_equal(state_around(saved, 0).doubt, ~later), "a later record has their newest copies"


def test_a_missing_one(saved: Store, layout: Layout) -> None:
    (saved.root / record_path(0, 2)).unlink()
    assert steps(saved, layout) == [3 if i % 3 == 0 else 1 for i in range(layout.partitions)]
    assert state_around(saved, 0).damaged[0].reason.endswith("this record is missing (the log has 0 to 3)")


def test_the_newest_is_missing_and_its_index_is_there(saved: Store, layout: Layout, data: Data) -> None:
    with open_writer(saved, layout=layout) as writer:
        seq = writer.commit(0, np.arange(layout.partitions), data, step=4, sealed=True).seq
    assert saved.log(0).indexes() == [seq]
    path = saved.root / record_path(0, seq)
    path.unlink()
    state = state_around(saved, 0)
    assert [one.file for one in state.damaged] == [str(path)]
    assert state.doubt.all()
    shared = open_shares(saved)
    (plan,) = plans_back(shared, [None], 0, None)
    assert (plan.step, plan.degraded) == (1, True)
    (
        saved.root / index_path(0, seq)
    ).unlink()  # as docs/troubleshooting.md says of a record that is moved away
    assert not state_around(saved, 0).damaged


def test_all_records_are_gone_and_an_index_is_there(saved: Store, layout: Layout, data: Data) -> None:
    """The store is not empty: no new log begins, whose writer would collect the segments."""
    with open_writer(saved, layout=layout) as writer:
        writer.commit(0, np.arange(layout.partitions), data, step=4, sealed=True)
    for record in (saved.root / "shards/0/log").iterdir():
        record.unlink()
    for read in (
        open_shares,
        lambda store: store.state(0),
        lambda store: state_around(store, 0),
        lambda store: open_writer(store, layout=layout),
    ):
        with pytest.raises(Corruption, match=r"this record is missing \(the log is empty\)"):
            read(saved)


def test_a_whole_state_after_it_is_exact(saved: Store, layout: Layout, data: Data) -> None:
    with open_writer(saved, layout=layout) as writer:
        writer.commit(0, np.arange(layout.partitions), data, step=4, sealed=True)
        damage(saved, 2)
    without_indexes(saved)
    assert steps(saved, layout) == [4] * layout.partitions
    state = state_around(saved, 0)
    assert not state.doubt.any()
    assert state.whole
    assert sealed_sets([state])[0].step == 4


def test_not_the_one_that_all_others_need(saved: Store) -> None:
    """Record 0 lists the members."""
    damage(saved, 0)
    with pytest.raises(Corruption, match="its checksum does not match"):
        state_around(saved, 0)


def test_not_if_all_are_damaged(saved: Store) -> None:
    for seq in range(4):
        damage(saved, seq)
    for read in (layout_around, lambda store: state_around(store, 0)):
        with pytest.raises(Corruption, match="its checksum does not match"):
            read(saved)


def test_not_what_a_later_version_wrote(saved: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_format, "NEWEST_FORMAT", 0)
    for read in (layout_around, lambda store: state_around(store, 0)):
        with pytest.raises(Corruption, match="newer than this scarctl reads") as caught:
            read(saved)
        assert caught.value.kind == "newer-format"


def test_without_the_newest_file_the_log_goes_on(saved: Store, layout: Layout, data: Data) -> None:
    """As docs/troubleshooting.md says: it is moved out of the store."""
    damage(saved, 3).rename(saved.root.parent / "damaged")
    assert not saved.state(0).doubt.any()
    with open_writer(saved, layout=layout) as writer:
        writer.commit(0, np.arange(layout.partitions), data, step=4, sealed=True)
    assert verify(saved, read_data=True).problems == []


def test_a_newer_seal_that_damage_hides(saved: Store, layout: Layout, data: Data) -> None:
    """A rollback to the seal before it says so: the segment of the newest seal is damaged, or its record."""
    shard_of = saved.log_of(layout)
    with open_writer(saved, layout=layout) as writer:
        record = writer.commit(0, np.arange(layout.partitions), data, step=4, sealed=True)
    without_indexes(saved)
    assert not plan_rollback(saved, layout, shard_of).degraded
    assert record.segment is not None
    path = saved.root / "shards/0/seg" / record.segment.name
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    plan = plan_rollback(saved, layout, shard_of)
    assert (plan.step, plan.consistent, plan.degraded) == (1, True, True)
    damage(saved, record.seq)
    state = state_around(saved, 0)
    assert len(lost_seals([state], sealed_sets([state]))) == 1


def test_a_newer_seal_of_two_logs_that_damage_in_one_of_them_hides(
    tmp_path: Path, layout: Layout, data: Data
) -> None:
    """Log 0 has a still newer seal, which log 1 lacks."""
    store = store_with_a_log_per_shard(tmp_path / "run", shards=2)
    shard_of = layout.shards(2, 0)
    with open_writer(store, layout=layout, shard_of=shard_of) as writer:
        for step, logs in ((1, (0, 1)), (2, (0, 1)), (3, (0,))):
            for log in logs:
                writer.commit(log, writer.members[log], data, step=step, sealed=True, whole=f"{step:032x}")
    for index in store.root.glob("shards/*/index/*"):
        index.unlink()
    states = states_around(store, (0, 1))
    assert [one.step for one in sealed_sets(states.values())] == [2, 1]
    assert not open_shares(store).lost_seals
    damage(store, 2)
    shared = open_shares(store)
    assert [one.step for one in shared.sealed()] == [1]
    assert len(shared.lost_seals) == 1
    (plan,) = plans_back(shared, [None], 0, None)
    assert (plan.step, plan.consistent, plan.degraded) == (1, True, True)


def test_a_snapshot_whose_own_record_is_damaged_is_not_another_state(saved: Store, layout: Layout) -> None:
    """The older copies that are read around it are all of one step, too."""
    (seal,) = sealed_sets([saved.state(0)])
    snapshot = create_snapshot(saved, "kept", seal)
    with open_writer(saved, layout=layout) as writer:
        writer.commit(0, np.arange(layout.partitions), Data(layout, 1), step=4, sealed=True)
        create_snapshot(saved, "later", sealed_sets(writer.states.values())[0])
    without_indexes(saved)
    later = read_snapshot(saved, "later")
    for seq in range(2, 1 + later.seqs[0]):
        damage(saved, seq)
    assert plan_rollback(saved, layout, saved.log_of(layout), snapshot=snapshot).step == 1
    with pytest.raises(NoIntactCopy, match="'later' is damaged"):
        plan_rollback(saved, layout, saved.log_of(layout), snapshot=later)
