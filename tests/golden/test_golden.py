"""Test stores that were written once: read, verified, recovered, written to."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from scarctl.recovery.execute import execute
from scarctl.recovery.plan import Plan, plan_partial, plan_rollback
from scarctl.recovery.shared_plan import DiscardingSink, execute_shared, plan_lost, plans_back
from scarctl.recovery.shares import open_shares
from scarctl.state.encodings import ENCODINGS
from scarctl.state.version import step_of
from scarctl.store import Collector, Store, complete_sets, open_writer, read_snapshot, verify
from tests.golden.write import NEWEST, PART, WHOLE, Source, byte_of, encoded_layout, layout, ramp

HERE = Path(__file__).parent
STORES = sorted(path for path in (HERE / "1").glob("*/") if path.name not in ("encoded", "session"))
OF_ONE = [path for path in STORES if path.name != "ranks"]


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Return a copy of the store that may be changed."""
    return Store.open(shutil.copytree(request.param, tmp_path / request.param.name))


def content(store: Store, shard: int, at: int | None = None) -> dict[int, int]:
    """Return the byte of every partition."""
    state, found = store.state(shard, at=at), dict[int, int]()
    corrupt: list[tuple[np.ndarray, str]] = []
    for batch in store.read(state, state.ids, corrupt=corrupt):
        starts, stops = layout().row_ranges(batch.ids)
        for i, rows in zip(
            batch.ids.tolist(), np.split(batch.tensors[0], np.cumsum(stops - starts)[:-1]), strict=True
        ):
            (found[i],) = set(rows.ravel().tolist())
    assert not corrupt
    return found


def of_step(store: Store, shard: int, step: int) -> dict[int, int]:
    return {i: byte_of(i, step) for i in store.state(shard).ids.tolist()}


@pytest.mark.parametrize("store", STORES, ids=lambda path: f"{path.parent.name}-{path.name}", indirect=True)
def test_all_is_there(store: Store) -> None:
    assert verify(store, read_data=True).intact
    newest, *older = complete_sets(store)
    assert newest.step == NEWEST
    for shard, seq in newest.seqs.items():
        assert content(store, shard) == content(store, shard, at=seq) == of_step(store, shard, NEWEST)
        extras = store.read_extras(store.state(shard))
        assert extras is not None
        assert extras[1] == {"step": NEWEST}
    for one in older:
        assert one.step == WHOLE
        assert all(content(store, s, at=seq) == of_step(store, s, WHOLE) for s, seq in one.seqs.items())


@pytest.mark.parametrize("store", OF_ONE, ids=lambda path: f"{path.parent.name}-{path.name}", indirect=True)
def test_one_process_recovers_it(store: Store) -> None:
    found = layout()
    shard_of, everything = store.shard_of(found), np.arange(found.partitions)
    plans: list[Plan] = [
        plan_partial(everything, found, shard_of, store.state(0)),
        plan_rollback(store, found, shard_of),
    ]
    for plan in plans:
        report = execute(plan, store, None, DiscardingSink())
        assert (report.step, report.consistent, report.degraded) == (NEWEST, True, False)
    if store.root.name == "kept":
        back = plan_rollback(store, found, shard_of, snapshot=read_snapshot(store, "first"))
        assert (back.step, back.consistent) == (WHOLE, True)
        assert content(store, 0, at=back.seq) == of_step(store, 0, WHOLE)


@pytest.mark.parametrize("store", OF_ONE, ids=lambda path: f"{path.parent.name}-{path.name}", indirect=True)
def test_one_process_goes_on_with_it(store: Store) -> None:
    found = layout()
    with open_writer(store, layout=found) as writer:
        writer.commit(writer.state.ids, Source(9), step=9, sealed=True, whole="ab" * 16)
        Collector(writer, floor=0).collect()
    again = Store.open(store.root)
    assert verify(again, read_data=True).intact
    plan = plan_partial(np.arange(found.partitions), found, again.shard_of(found), again.state(0))
    assert (plan.step, plan.consistent) == (9, True)


@pytest.mark.parametrize(
    "store",
    [path for path in STORES if path.name == "ranks"],
    ids=lambda path: path.parent.name,
    indirect=True,
)
def test_ranks_recover_it(store: Store) -> None:
    state = open_shares(store)
    nothing = [None] * len(state.shares)
    for plan in (plan_lost(state, state.everything(), nothing), next(plans_back(state, nothing, 0, None))):
        report = execute_shared(plan, nothing, [DiscardingSink() for _ in state.shares])
        assert (report.plan.step, report.plan.consistent, report.plan.degraded) == (NEWEST, True, False)


def test_what_a_part_has_saved_is_as_it_was(tmp_path: Path) -> None:
    """Check the record of step 5 in a log that was not collected."""
    for path in STORES:
        if path.name == "one":
            store = Store.open(path)
            state = store.state(0, at=store.log(0).term(1).place(3).seq)
            assert sorted({int(v) & 0xFF for v in state.version}) == [WHOLE, PART]
            assert state.whole == ""
        if path.name == "mixed":
            store = Store.open(path)
            assert [record.mixed for record in store.log(0).records()] == [False, False, True, False]
            at = store.log(0).term(1).place(3).seq
            state = store.state(0, at=at)
            steps = dict(enumerate(step_of(state.version).tolist()))
            assert steps == {0: PART - 1, 1: PART, 2: PART - 1, **dict.fromkeys(range(3, 6), WHOLE)}
            assert content(store, 0, at=at) == {i: byte_of(i, step) for i, step in steps.items()}


@pytest.mark.parametrize("path", sorted(HERE.glob("*/encoded")), ids=lambda path: path.parent.name)
def test_encoded_copies_have_the_values_that_were_written(path: Path, tmp_path: Path) -> None:
    store = Store.open(shutil.copytree(path, tmp_path / "encoded"))
    assert verify(store, read_data=True).intact
    state, corrupt = store.state(0), list[tuple[np.ndarray, str]]()
    assert [ENCODINGS[n] for n in state.encoding(state.ids)] == ["bfloat16"] * 2 + ["int8"] * 2
    batches = sorted(store.read(state, state.ids, corrupt=corrupt), key=lambda batch: int(batch.ids[0]))
    assert not corrupt
    own, slot = (np.concatenate([batch.tensors[t].view(np.float32) for batch in batches]) for t in (0, 1))
    assert own[0, :4].tolist() == [-6.65625, -6.34375, -6.0, -5.65625]
    scale = np.float32(np.float32(43) / np.float32(3)) / np.float32(127)
    assert own[7, 6:].tolist() == [np.float32(124) * scale, np.float32(127) * scale]
    assert slot[1, :2].tolist() == [2.671875, 3.0]
    root = -np.sqrt(np.float32(np.float32(63) / np.float32(3))) / np.float32(255)
    assert slot[7, 6:].tolist() == [np.float32(np.float32(253) * root) ** 2, np.float32(255 * root) ** 2]
    exact = store.state(0, at=state.sealed[0].seq)
    assert not exact.encoded.any()
    [whole] = store.read(exact, exact.ids, corrupt=corrupt)
    assert [bytes(t) for t in whole.tensors] == [bytes(ramp(0, t, 0, 8)) for t in (0, 1)]
    plan = plan_partial(state.ids, encoded_layout(), store.shard_of(encoded_layout()), state)
    assert not plan.consistent
