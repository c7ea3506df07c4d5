"""Test what a commit takes and refuses: its partitions, steps and extras, and the record that it writes."""

from __future__ import annotations

import numpy as np
import pytest

from scarctl.errors import Corruption, LayoutMismatch, UsageError
from scarctl.state.layout import Layout, TensorSpec, build_layout
from scarctl.state.version import pack, step_of
from scarctl.store import Store, open_writer, verify
from scarctl.store.format import dump_json
from scarctl.store.older import older_copies
from scarctl.store.record import Record
from scarctl.store.writer import StoreWriter
from tests.store.helpers import Data, read_all


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"ids": [0], "step": -1}, "step -1"),
        ({"ids": [0], "step": 2**40}, "step"),
        ({"ids": [0, 0], "step": 1}, "twice"),
        ({"ids": [10**6], "step": 1}, "not of lane"),
        ({"ids": [-1], "step": 1}, "not of lane"),
        ({"ids": [], "step": 1}, "nothing to commit"),
        ({"ids": [0], "step": 1, "sealed": True}, "cannot be sealed"),
    ],
)
def test_bad_calls_write_nothing(
    store: Store, writer: StoreWriter, data: Data, call: dict, words: str
) -> None:
    before = sorted(p for p in store.root.rglob("*"))
    with pytest.raises(UsageError, match=words):
        writer.commit(np.array(call.pop("ids"), np.int64), data, **call)
    assert sorted(p for p in store.root.rglob("*")) == before


def test_extras_that_cannot_be_stored_write_nothing(store: Store, writer: StoreWriter, data: Data) -> None:
    before = sorted(store.root.rglob("*"))
    with pytest.raises(UsageError, match="sched"):
        writer.commit(np.array([1]), data, step=0, extras={"sched": object()})
    assert sorted(store.root.rglob("*")) == before


def test_another_model_is_refused_and_nothing_is_written(store: Store, layout: Layout) -> None:
    with open_writer(store, layout=layout):
        pass
    other = build_layout([("emb", "parameter", (TensorSpec("", "F32", (38, 3)),))])
    before = sorted(store.root.rglob("*"))
    with pytest.raises(LayoutMismatch, match="emb"):
        open_writer(store, layout=other)
    assert sorted(store.root.rglob("*")) == before
    with pytest.raises(LayoutMismatch):
        store.state(0, other)


def test_a_commit_of_copies_of_several_steps(store: Store, writer: StoreWriter, data: Data) -> None:
    data.change(range(10), 1)
    writer.commit(np.arange(10), data, step=1)
    first = data.all([3, 4, 5])
    data.change([3, 4, 5], 2)
    ids, steps = np.array([3, 4, 5]), np.array([2, 4, 1])
    record = writer.commit(ids, data, step=5, steps=steps, extras={"step": 5})
    assert (record.mixed, record.version) == (True, pack(1, 5))
    for state in (writer.state, Store.open(store.root).state(0)):
        assert state.step == 5
        assert step_of(state.version[ids]).tolist() == steps.tolist()
        assert read_all(store, state)[0].items() >= data.all([3, 4, 5]).items()
        extras = store.read_extras(state)
        assert extras is not None
        assert (extras[0], extras[1]) == (pack(1, 5), {"step": 5})
    writer.commit(np.array([4]), data, step=6)
    older = older_copies(store.log(0), np.array([4]), writer.state)
    assert older is not None
    assert step_of(older.version).tolist() == [4]
    oldest = older_copies(store.log(0), np.array([4]), older)
    assert oldest is not None
    assert read_all(store, oldest) == ({4: first[4]}, {})
    assert verify(store, read_data=True).intact


def test_a_sealed_commit_of_copies_of_several_steps_is_of_its_step(
    store: Store, writer: StoreWriter, layout: Layout, data: Data
) -> None:
    everything = np.arange(layout.partitions)
    steps = everything % 4
    writer.commit(everything, data, step=3, steps=steps, sealed=True)
    for state in (writer.state, Store.open(store.root).state(0)):
        assert set(step_of(state.version).tolist()) == {3}
        assert state.whole


@pytest.mark.parametrize(
    ("steps", "what"),
    [
        ([2, 2], "2 steps are given for 3 partitions"),
        ([2, 2, 6], "steps 0 to 5 only"),
        ([2, -1, 2], "steps 0 to 5 only"),
        ([0, 2, 2], "its saved copy is newer than step 0"),
    ],
)
def test_steps_that_a_commit_cannot_have(
    store: Store, writer: StoreWriter, data: Data, steps: list[int], what: str
) -> None:
    writer.commit(np.arange(10), data, step=1)
    with pytest.raises(UsageError, match=what):
        writer.commit(np.array([3, 4, 5]), data, step=5, steps=np.array(steps))
    assert writer.state.seq == Store.open(store.root).state(0).seq
    assert writer.state.records == 2


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "commit"},
        {"segment": None, "partitions": 0},
        {"whole": "a" * 32},
        {"seal": [1, "a" * 32, 99]},
        {"rest": 3},
        {"full": 99},
        {"parent": ""},
        {"base": [1, "a" * 32, 1]},
        {"line": ["a" * 32, 0]},
        {"epoch": 2},
        {"place": [1, "a" * 32, 2]},
        {"lane": 1},
        {"format": 2},
    ],
)
def test_a_record_that_contradicts_itself(writer: StoreWriter, data: Data, change: dict[str, object]) -> None:
    record = writer.commit(np.array([3, 4]), data, step=5, steps=np.array([3, 5]))
    Record.parse(dump_json(record.to_json()), "record", shard=0, place=record.place)
    with pytest.raises(Corruption):
        Record.parse(dump_json({**record.to_json(), **change}), "record", shard=0, place=record.place)
