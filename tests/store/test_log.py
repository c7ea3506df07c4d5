"""Test commits, terms and roll-backs: the log's state is what the writer did."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from scarctl.errors import Corruption, UsageError
from scarctl.state.layout import Layout
from scarctl.state.version import epoch_of, pack, step_of
from scarctl.store import Store, open_writer, verify
from scarctl.store.compact import read_pieces
from scarctl.store.older import older_copies
from scarctl.store.record import Record
from scarctl.store.snapshot import is_kept
from scarctl.store.table import FULL_LEAST, FULL_RECORDS
from scarctl.store.term import Term
from scarctl.store.usage import usage
from scarctl.store.writer import StoreWriter
from tests.store.helpers import Data, memory_folder, read_all, small_layout, summary

LAYOUT = small_layout()
EVERYTHING = np.arange(LAYOUT.partitions)


@dataclass
class Model:
    """The expected content of a lane."""

    copies: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    extras: tuple[int, object] | None = None
    sealed: list[int] = field(default_factory=list)
    step: int = -1

    def copy(self) -> Model:
        return Model(dict(self.copies), self.extras, list(self.sealed), self.step)


class LogMachine(RuleBasedStateMachine):
    """Random commits, seals, roll-backs and reopenings against a dictionary."""

    @initialize()
    def start(self) -> None:
        self.folder = memory_folder()
        self.store = Store.create(self.folder / "run")
        self.writer: StoreWriter = open_writer(self.store, layout=LAYOUT)
        self.data = Data(LAYOUT)
        self.model = Model()
        self.history = {self.writer.state.seq: Model()}
        self.step = 0
        self.seed = 0

    @rule(
        share=st.sampled_from([0.05, 0.3, 1.0]),
        ahead=st.integers(0, 3),
        sealed=st.booleans(),
        extras=st.none() | st.integers(0, 9).map(lambda x: {"x": np.full(3, x), "t": (x,)}),
    )
    def commit(self, share: float, ahead: int, sealed: bool, extras: object) -> None:
        self.seed += 1
        self.step += ahead
        rng = np.random.default_rng(self.seed)
        ids = rng.permutation(EVERYTHING)[: int(len(EVERYTHING) * share)]
        if sealed and set(self.model.copies) | set(ids.tolist()) != set(EVERYTHING.tolist()):
            with pytest.raises(UsageError, match="cannot be sealed"):
                self.writer.commit(ids, self.data, step=self.step, sealed=True)
            return
        self.data.change(ids.tolist(), self.seed)
        record = self.writer.commit(ids, self.data, step=self.step, sealed=sealed, extras=extras)
        state = self.writer.state
        # Otherwise a record should have had the table.
        assert 2 * state.since < len(state.ids) or state.records - state.full < FULL_LEAST
        version = pack(self.writer.epoch, self.step)
        self.model.copies.update({i: (version, self.data.partition(i)) for i in ids.tolist()})
        self.model.step = self.step
        if extras is not None:
            self.model.extras = (version, extras)
        if sealed:
            self.model.copies = {i: (version, b) for i, (_, b) in self.model.copies.items()}
            self.model.sealed.append(record.seq)
        self.history[record.seq] = self.model.copy()

    @rule(pick=st.integers(0, 1000))
    def roll_back(self, pick: int) -> None:
        kept = [seq for seq in sorted(self.history) if is_kept(self.store, self.writer.state, seq)]
        seq, epoch = kept[pick % len(kept)], self.writer.epoch
        self.writer.roll_back(seq)
        assert self.writer.epoch == self.writer.term.number > epoch
        self.model = self.history[seq].copy()
        self._begun()
        self.step = 0

    @rule(clean=st.booleans())
    def reopen(self, clean: bool) -> None:
        if clean:
            self.writer.close()
        else:
            self.writer._lock.release()  # as if the process had been killed
        self.store = Store.open(self.store.url)
        self.writer = open_writer(self.store, layout=LAYOUT)
        self._begun()

    @rule(full=st.booleans())
    def go_on(self, full: bool) -> None:
        """Commit a record that changes nothing, or begin another term: the epoch stays."""
        epoch, line = self.writer.epoch, self.writer.state.line
        if full:
            self.writer.repeat()
        else:
            self.writer.renew()
        assert (self.writer.epoch, self.writer.state.line) == (epoch, line)
        self._begun()

    def _begun(self) -> None:
        self.history[self.writer.state.seq] = self.model.copy()

    @invariant()
    def log_says_what_happened(self) -> None:
        live = self.writer.state
        state = Store.open(self.store.url).state(0, LAYOUT)
        assert summary(state) == summary(live)
        assert state.ids.tolist() == EVERYTHING.tolist()
        assert {int(i): int(v) for i, v in zip(state.ids, state.version, strict=True) if v >= 0} == {
            i: v for i, (v, _) in self.model.copies.items()
        }
        assert read_all(self.store, state) == ({i: b for i, (_, b) in self.model.copies.items()}, {})
        assert [seal.seq for seal in state.sealed] == self.model.sealed
        assert state.step == self.model.step
        assert repr(self.store.read_extras(state)) == repr(self.model.extras)
        seq = sorted(self.history)[len(self.history) // 2]
        past = self.store.state(0, at=seq)
        assert read_all(self.store, past)[0] == {i: b for i, (_, b) in self.history[seq].copies.items()}

    def teardown(self) -> None:
        if hasattr(self, "writer"):
            try:
                assert verify(self.store, read_data=True).problems == []
                assert verify(self.store, read_data=True).orphans == []
            finally:
                self.writer.close()
                shutil.rmtree(self.folder)


LogMachine.TestCase.settings = settings(max_examples=10, stateful_step_count=12)
TestLog = LogMachine.TestCase


def test_a_new_epoch_orders_versions(store: Store, layout: Layout, data: Data) -> None:
    with open_writer(store, layout=layout) as writer:
        writer.commit(np.arange(10), data, step=100)
    with open_writer(store, layout=layout) as writer:
        assert writer.epoch == 2
        writer.commit(np.arange(5), data, step=3)
        version = writer.state.version
        assert version[:5].min() > version[5:10].max()
        assert (epoch_of(version[:5]).tolist(), step_of(version[:5]).tolist()) == ([2] * 5, [3] * 5)
        with pytest.raises(UsageError, match="backwards"):
            writer.commit(np.arange(5), data, step=2)
    assert [r.kind for r in store.log(0).records()] == ["full", "delta", "full", "delta"]


def test_reading_needs_the_newest_full_record_and_those_after_it(
    store: Store, writer: StoreWriter, layout: Layout, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(27):
        writer.commit(np.arange(step, step + 3), data, step=step)
    state = writer.state
    after = state.records - state.full
    assert 0 < after < state.records - FULL_LEAST
    opened: list[str] = []
    original = type(store.blobs).reader

    def counted(self: object, name: str) -> object:
        opened.append(name.split("/")[-1 if "layout" in name else 2])
        return original(self, name)  # type: ignore[arg-type]

    monkeypatch.setattr(type(store.blobs), "reader", counted)
    store.state(0)
    assert opened.count("seg") == after + 1
    # The newest two show how far the log counts.
    assert opened.count("log") == after + 1 + 2


def test_a_record_at_least_every_so_often_is_full(
    store: Store, writer: StoreWriter, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scarctl.store.writer.FULL_RECORDS", 5)
    kinds = [writer.commit(np.array([1]), data, step=step).kind for step in range(12)]
    assert [k for k, kind in enumerate(kinds) if kind == "full"] == [4, 9]
    assert FULL_RECORDS == 512


def test_older_copies_step_by_step(store: Store, writer: StoreWriter, data: Data) -> None:
    versions: list[dict[int, bytes]] = []
    ids = np.array([3, 4, 5])
    for step in range(4):
        data.change(range(10), step)
        writer.commit(ids if step else np.arange(10), data, step=step)
        versions.append(data.all(ids.tolist()))
    state = writer.state
    for step in (2, 1, 0):
        older = older_copies(store.log(0), ids, state)
        assert older is not None
        assert step_of(older.version).tolist() == [step] * 3
        assert read_all(store, older) == (versions[step], {})
        state = older
    assert older_copies(store.log(0), ids, state) is None
    assert older_copies(store.log(0), np.array([9]), writer.state) is None
    mixed = older_copies(store.log(0), np.array([3, 9]), writer.state)
    assert mixed is not None
    assert mixed.version.tolist() == [pack(1, 2), -1]


def test_an_older_copy_has_the_version_of_the_seal_above_it(
    store: Store, writer: StoreWriter, layout: Layout, data: Data
) -> None:
    writer.commit(np.arange(layout.partitions), data, step=0, sealed=True)
    writer.commit(np.array([1]), data, step=5, sealed=True)
    writer.commit(np.array([2]), data, step=7)
    older = older_copies(store.log(0), np.array([1, 2]), writer.state)
    assert older is not None
    assert step_of(older.version).tolist() == [0, 5]


def test_older_does_not_see_what_was_rolled_back(store: Store, writer: StoreWriter, data: Data) -> None:
    writer.commit(np.arange(5), data, step=0)
    base = writer.state.seq
    writer.commit(np.arange(5), data, step=9)
    writer.roll_back(base)
    writer.commit(np.arange(5), data, step=1)
    older = older_copies(store.log(0), np.arange(5), writer.state)
    assert older is not None
    assert older.version.tolist() == [pack(1, 0)] * 5
    with pytest.raises(UsageError):
        writer.roll_back(99)


def test_a_lane_may_lose_all_partitions(store: Store, layout: Layout, data: Data) -> None:
    with open_writer(store, layout=layout) as writer:
        writer.commit(np.arange(20), data, step=0)
    with open_writer(store, layout=layout, empty=True) as writer:
        none = np.empty(0, np.int64)
        writer.commit(none, data, step=1, sealed=True, extras={"retired": True})
        assert summary(store.state(0)) == summary(writer.state)
        assert (len(writer.state.ids), len(writer.state.sealed)) == (0, 1)
    assert verify(store, read_data=True).problems == []


def test_usage_counts_files_and_live_bytes(
    store: Store, writer: StoreWriter, layout: Layout, data: Data
) -> None:
    writer.commit(np.arange(layout.partitions), data, step=0)
    writer.commit(np.arange(3), data, step=1)
    counts = usage(store, [writer.state])
    assert counts["live_bytes"] == layout.nbytes
    assert (counts["records"], counts["segments"]) == (3, 3)
    on_disk = sum(p.stat().st_size for p in store.root.rglob("*") if p.is_file() and p.name != "lock")
    assert counts["bytes"] == on_disk


def test_moving_copies_does_not_make_them_newer(store: Store, writer: StoreWriter, data: Data) -> None:
    for step in range(3):
        writer.commit(np.arange(step, step + 4), data, step=step)
    before, line = writer.state.version.copy(), writer.state.line
    ids = np.arange(6)
    state = writer.state
    _, pieces, bad = read_pieces(store, state, state.layout or LAYOUT, ids)
    record = writer.compact(ids, pieces)
    assert not bad
    after = store.state(0)
    assert (after.version.tolist(), after.line) == (before.tolist(), line)
    assert record.segment is not None
    assert {after.segments[s].name for s in after.segment[:6].tolist()} == {record.segment.name}
    assert read_all(store, after) == (data.all(range(6)), {})
    assert verify(store, read_data=True).intact
    with pytest.raises(Corruption, match="changed while they were moved"):
        writer.compact(ids, {key: np.zeros_like(piece) for key, piece in pieces.items()})
    assert verify(store, read_data=True).orphans == []


def test_of_one_record_above_a_hole_nothing_counts(
    store: Store, writer: StoreWriter, layout: Layout, data: Data
) -> None:
    """It has arrived late: the log ends before it, and the next opening closes it in the hole."""
    records = [writer.commit(np.arange(step, step + 4), data, step=step) for step in range(3)]
    writer.close()
    (store.root / records[1].place.path(0)).unlink()
    assert store.state(0).step == 0
    problems = verify(store, read_data=True).problems
    assert [p.file for p in problems] == [store.blobs.where(records[1].place.path(0))]
    with open_writer(store, layout=layout) as writer:
        assert writer.state.step == 0
        writer.commit(np.arange(3), data, step=1)
    assert store.log(0).at(records[1].place).ends
    assert read_all(store, store.state(0)) == (data.all(range(4)), {})


def test_a_record_that_is_missing_below_several_is_damage(
    store: Store, writer: StoreWriter, layout: Layout, data: Data
) -> None:
    records = [writer.commit(np.arange(step, step + 4), data, step=step) for step in range(4)]
    writer.close()
    path = store.root / records[1].place.path(0)
    kept = path.read_bytes()
    path.unlink()
    for use in (lambda: store.state(0), lambda: open_writer(store, layout=layout)):
        with pytest.raises(Corruption, match="this record is missing, and there are later ones"):
            use()
    state = store.state(0, around=True)
    assert (state.step, state.doubt.all(), state.damaged[0].file) == (0, True, str(path))
    path.write_bytes(kept)
    with open_writer(store, layout=layout) as writer:
        assert writer.state.step == 3


def test_a_record_that_arrives_above_a_closing_does_not_count(
    store: Store, layout: Layout, data: Data
) -> None:
    """A backup was put back under a writer, and one of its requests arrives after that."""
    with open_writer(store, layout=layout) as writer:
        first = writer.commit(np.arange(4), data, step=0)
        hidden = writer.commit(np.arange(4), data, step=1)
        late = writer.commit(np.arange(4), data, step=2)
    for record in (hidden, late):
        (store.root / record.place.path(0)).unlink()
    term = Term(0, 2)  # an opening that was killed after it had closed the log
    store.blobs.create_exclusive(term.path, [term.data])
    end = Record(0, hidden.place, "end", closer=(2, term.id))
    store.blobs.create_exclusive(hidden.place.path(0), [end.data])
    store.blobs.create_exclusive(late.place.path(0), [late.data])
    assert store.state(0).seq == first.seq
    with open_writer(store, layout=layout) as writer:
        assert writer.state.step == 0
