"""Test a state in shares: one share per rank, or the share of the only process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scarctl.errors import Corruption, LayoutMismatch, NoIntactCopy
from scarctl.recovery.plan import plan_rollback, plan_sealed
from scarctl.recovery.shared_plan import DiscardingSink, execute_shared, plan_lost, plans_back
from scarctl.recovery.shares import SharedState, named_snapshot, open_shares
from scarctl.state.layout import Layout, TensorSpec, build_layout
from scarctl.store import (
    SealedSet,
    Store,
    Topology,
    complete_sets,
    create_snapshot,
    create_topology,
    open_writer,
)
from tests.support.ranks import RankStore

SHARDS = 3


def layout(rows: int = 30) -> Layout:
    return build_layout([("w", "parameter", (TensorSpec("", "F32", (rows, 4)),))], partition_bytes=16)


def save(store: Store, *steps: int, rows: int = 30) -> None:
    """Seal the whole state after each of these steps."""
    of = layout(rows)
    with open_writer(store, layout=of) as writer:
        for step in steps:
            data = np.full((rows, 16), step, np.uint8)
            writer.commit(
                np.arange(of.partitions),
                lambda g, t, start, stop, data=data: memoryview(data[start:stop]),
                step=step,
                sealed=True,
                whole=f"{step:032x}",
            )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store.create(tmp_path / "s", shards=SHARDS)
    save(made, 3, 5)
    return made


def damage_log(path: Path, shard: int, place: int) -> None:
    """Truncate the record at this place of a lane's log."""
    record = sorted(path.glob(f"lanes/{shard}/log/*/*.json"))[place]
    record.write_bytes(record.read_bytes()[:-9])


def test_one_process_is_one_share(store: Store) -> None:
    state = open_shares(store)
    (share,) = state.shares
    assert (share.rank, state.topology, state.head, state.nbytes) == (None, None, 5, 30 * 16)
    assert set(state.states) == {0}
    plan = plan_lost(state, state.everything(), [None])
    assert (plan.consistent, plan.step, plan.restored) == (True, 5, 30)
    assert "ranks" not in plan.to_json()
    assert [one.step for one in plans_back(state, [None], 1, None)] == [5, 3]


def test_nothing_is_saved_yet(tmp_path: Path) -> None:
    with pytest.raises(NoIntactCopy) as caught:
        open_shares(Store.create(tmp_path / "s"))
    assert caught.value.kind == "nothing-saved"


@pytest.mark.parametrize(("place", "exact"), [(-2, True), (-1, False)])
def test_a_damaged_record_is_read_around(store: Store, place: int, exact: bool) -> None:
    """A later commit of the whole state makes up for it. Without one, older copies are taken, and that is said."""
    damage_log(store.root, 0, place)
    state = open_shares(store)
    plan = plan_lost(state, state.everything(), [None])
    assert (plan.consistent, plan.degraded, plan.step) == (exact, not exact, 5 if exact else 3)
    back = next(plans_back(state, [None], 1, None))
    assert (back.consistent, back.degraded, back.step) == (True, not exact, 5 if exact else 3)


def test_a_rank_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Nothing is known without the first record."""
    ranks = RankStore(tmp_path / "ranks", 3).save(5).close()
    for place in (0, 1):
        damage_log(ranks.path, 2, place)
    with pytest.raises(Corruption, match="lanes/2/log"):
        open_shares(ranks.store)


def test_a_rank_that_owns_nothing_goes_back_to_its_own_part_of_the_state(tmp_path: Path) -> None:
    """It has sealed its extras alone. If that record is not known any longer, its log begins a term as it is."""
    ranks = RankStore(tmp_path / "ranks", 2)
    create_topology(ranks.store, Topology(2, (0, 1, 2), "ab" * 32))
    view, empty = ranks.store.of_shard(2), Layout([], "Adam")
    ranks.save(3)
    whole = ranks.store.state(0).whole
    with open_writer(view, layout=empty) as writer:

        def seal(step: int, name: str) -> int:
            extras = {"step": step}
            none = np.empty(0, np.int64)
            return writer.commit(
                none, lambda *_: memoryview(b""), step=step, sealed=True, whole=name, extras=extras
            ).seq

        first, other = seal(3, whole), seal(4, "cd" * 16)
        back = plan_rollback(view, empty, view.shard_of(empty))
        assert (back.step, back.seq, back.whole) == (3, first, whole)
        assert view.read_extras(back.state) == (back.state.extras[0], {"step": 3})  # type: ignore[index]
        unknown = SealedSet(1, 3, {}, "ef" * 16)
        assert plan_sealed(view, empty, view.shard_of(empty), unknown).seq == other
        writer.roll_back(first)
        assert writer.state.step == 3
    ranks.close()


def test_what_was_saved_meanwhile_is_seen_when_asked_again(store: Store, tmp_path: Path) -> None:
    ranks = RankStore(tmp_path / "ranks", 3).save(5)
    alone, together = open_shares(store), open_shares(ranks.store)
    save(store, 8)
    ranks.save(8).close()

    def newest(state: SharedState) -> tuple[int, int]:
        return state.head, state.sealed()[0].step

    assert newest(alone) == newest(together) == (5, 5)
    assert newest(alone.again()) == newest(together.again()) == (8, 8)


def test_a_snapshot_of_another_layout_is_refused(store: Store, tmp_path: Path) -> None:
    create_snapshot(store, "kept", complete_sets(store)[0])
    kept = named_snapshot(store, "kept")
    assert kept is not None
    (plan,) = plans_back(open_shares(store, kept), [None], 0, kept)
    assert (plan.step, plan.snapshot, plan.consistent) == (5, "kept", True)
    other = Store.create(tmp_path / "other", shards=SHARDS)
    save(other, 5, rows=31)
    with pytest.raises(LayoutMismatch, match="'kept' has another layout"):
        open_shares(other, kept)


def test_damage_reaches_whoever_tries_an_older_state(store: Store) -> None:
    state = open_shares(store)
    newest, older = plans_back(state, [None], 0, None)
    for path in (store.root / "lanes" / "0" / "seg").iterdir():
        data = bytearray(path.read_bytes())
        at = 8 + int.from_bytes(data[:8], "little")
        if data[at] == 5:
            data[at] ^= 1
            path.write_bytes(data)
    with pytest.raises(NoIntactCopy, match="checksum") as caught:
        execute_shared(newest, [None], [DiscardingSink()])
    assert caught.value.kind == "no-sealed-state"
    done = execute_shared(older, [None], [DiscardingSink()]).plan
    assert (done.consistent, done.step, done.degraded) == (True, 3, True)
