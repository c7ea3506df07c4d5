"""Test compaction, collection and snapshots between commits: kept states are unchanged, the rest is deleted."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from scarctl.errors import Corruption, Unavailable, UsageError
from scarctl.state.layout import Layout, TensorSpec, build_layout
from scarctl.state.version import pack, step_of
from scarctl.store import (
    Collector,
    SealedSet,
    Store,
    StoreWriter,
    create_snapshot,
    delete_snapshot,
    open_writer,
    read_snapshot,
    sealed_sets,
    snapshots,
    verify,
)
from scarctl.store.older import older_copies
from scarctl.store.term import Place
from tests.store.helpers import Data, memory_folder, read_all, small_layout, summary

LAYOUT = small_layout()
EVERYTHING = np.arange(LAYOUT.partitions)
NAMES = st.sampled_from(["a", "b.2", "C-3"])
Copies = dict[int, tuple[int, bytes]]


@dataclass
class Model:
    """The expected store: per partition version and bytes; consistent states; snapshots."""

    copies: Copies = field(default_factory=dict)
    sealed: dict[Place, Copies] = field(default_factory=dict)
    named: dict[str, tuple[SealedSet, Copies]] = field(default_factory=dict)


class SpaceMachine(RuleBasedStateMachine):
    """Random commits, compaction, collection, snapshots, roll-backs, kills and reopenings against dictionaries."""

    @initialize()
    def start(self) -> None:
        self.folder = memory_folder()
        self.store = Store.create(self.folder / "run")
        self.model = Model()
        self.data = Data(LAYOUT)
        self.step = self.seed = 0
        self._open()
        self.seal()

    def _open(self) -> None:
        self.writer: StoreWriter = open_writer(self.store, layout=LAYOUT)
        self.collector = Collector(self.writer, ratio=1.2, floor=0, turn_bytes=20_000)

    @rule(share=st.sampled_from([0.1, 0.3, 0.7]), ahead=st.integers(0, 3))
    def commit(self, share: float, ahead: int) -> None:
        self.seed += 1
        self.step += ahead
        rng = np.random.default_rng(self.seed)
        ids = rng.permutation(EVERYTHING)[: int(len(EVERYTHING) * share)]
        self.data.change(ids.tolist(), self.seed)
        extras = {"n": self.seed} if self.seed % 3 else None
        self.writer.commit(ids, self.data, step=self.step, extras=extras)
        version = pack(self.writer.epoch, self.step)
        self.model.copies.update({i: (version, self.data.partition(i)) for i in ids.tolist()})

    @rule()
    def seal(self) -> None:
        """Seal at a step that no other consistent state has."""
        self.seed += 1
        self.step += 1
        missing = np.array([i for i in EVERYTHING.tolist() if i not in self.model.copies], np.int64)
        extras = {"s": self.seed}
        record = self.writer.commit(missing, self.data, step=self.step, sealed=True, extras=extras)
        version = pack(self.writer.epoch, self.step)
        copies = {i: b for i, (_, b) in self.model.copies.items()}
        self.model.copies = {i: (version, copies.get(i, self.data.partition(i))) for i in EVERYTHING.tolist()}
        self.model.sealed[record.place] = dict(self.model.copies)

    @rule(turns=st.integers(1, 4))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.collector.turn()

    @rule()
    def collect(self) -> None:
        self.collector.collect()
        assert self.collector._garbage == []
        assert verify(self.store, read_data=False).orphans == []

    @rule()
    def renew(self) -> None:
        self.writer.renew()

    @rule(name=NAMES, newest=st.booleans())
    def snapshot(self, name: str, newest: bool) -> None:
        """Name a consistent state: the newest one, or one that was perhaps given up."""
        places = list(self.model.sealed)
        place = self._newest().places[0] if newest else places[self.seed % len(places)]
        sealed = SealedSet(1, 1, {0: place}, "a" * 32)
        if name in self.model.named:
            with pytest.raises(UsageError, match="already"):
                create_snapshot(self.store, name, self._newest())
            return
        try:
            create_snapshot(self.store, name, sealed)
        except Unavailable:
            assert not newest
            assert all(seal.place != place for seal in self.writer.state.sealed)
            return
        self.model.named[name] = sealed, self.model.sealed[place]

    @rule(name=NAMES)
    def delete_snapshot(self, name: str) -> None:
        if name in self.model.named:
            delete_snapshot(self.store, name)
            del self.model.named[name]
        else:
            with pytest.raises(UsageError, match="no snapshot"):
                delete_snapshot(self.store, name)

    # Whether there is a snapshot may depend on the sizes of files with times in them: so draw nothing from
    # the model.
    @rule(pick=st.integers(0, 11))
    def roll_back(self, pick: int) -> None:
        """Roll back to the newest sealed set or to a snapshot, also one of abandoned steps."""
        newest = self._newest()
        kept = [(newest, self.model.sealed[newest.places[0]]), *self.model.named.values()]
        sealed, copies = kept[pick % len(kept)]
        self.writer.roll_back(sealed.seqs[0])
        self.model.copies = dict(copies)
        self.step = 0

    @rule(clean=st.booleans())
    def reopen(self, clean: bool) -> None:
        if clean:
            self.writer.close()
        else:
            self.writer._lock.release()  # as if the process had been killed
        self.store = Store.open(self.store.url)
        self._open()

    def _newest(self) -> SealedSet:
        return sealed_sets([self.writer.state])[0]

    @invariant()
    def everything_kept_is_as_it_was(self) -> None:
        store = Store.open(self.store.url)
        assert summary(store.state(0, LAYOUT)) == summary(self.writer.state)
        self._same(store, None, self.model.copies)
        newest = self._newest()
        for sealed, copies in [
            (newest, self.model.sealed[newest.places[0]]),
            *self.model.named.values(),
        ]:
            self._same(store, sealed.seqs[0], copies)
        assert {s.name: dict(s.places) for s in snapshots(store)} == {
            name: dict(sealed.places) for name, (sealed, _) in self.model.named.items()
        }

    def _same(self, store: Store, at: int | None, copies: Copies) -> None:
        state = store.state(0, LAYOUT, at=at)
        versions = {int(i): int(v) for i, v in zip(state.ids, state.version, strict=True) if v >= 0}
        assert versions == {i: v for i, (v, _) in copies.items()}
        assert read_all(store, state) == ({i: b for i, (_, b) in copies.items()}, {})
        assert store.read_extras(state) is not None

    def teardown(self) -> None:
        if hasattr(self, "writer"):
            try:
                assert verify(self.store, read_data=True).problems == []
            finally:
                self.writer.close()
                shutil.rmtree(self.folder)


SpaceMachine.TestCase.settings = settings(max_examples=5, stateful_step_count=16, deadline=None)
TestSpace = pytest.mark.slow(SpaceMachine.TestCase)


@pytest.fixture
def grown(store: Store, layout: Layout, data: Data) -> Store:
    """Return a store of one shard: sealed at steps 0 and 1, then partial commits that leave dead copies everywhere."""
    with open_writer(store, layout=layout) as writer:
        for step in (0, 1):
            data.change(range(layout.partitions), step)
            writer.commit(np.arange(layout.partitions), data, step=step, sealed=True, extras={"n": step})
        for step in range(2, 20):
            ids = np.sort(np.random.default_rng(step).permutation(layout.partitions)[:20])
            data.change(ids.tolist(), step)
            writer.commit(ids, data, step=step, extras={"n": step})
    return store


def _collector(store: Store, layout: Layout) -> Collector:
    return Collector(open_writer(store, layout=layout), ratio=1.2, floor=0)


def test_a_reader_with_an_old_state_finds_what_was_moved(grown: Store, layout: Layout, data: Data) -> None:
    expected = data.all(range(layout.partitions))
    before = grown.state(0)
    versions = before.version.copy()
    collector = _collector(grown, layout)
    collector.collect()
    assert collector.done.moved_bytes > 0
    assert not any((grown.root / f"lanes/0/seg/{s.name}").exists() for s in before.segments[:1])
    assert read_all(grown, before) == (expected, {})
    assert before.version.tolist() == versions.tolist()
    assert grown.read_extras(before) is not None
    collector._writer.close()


def test_a_reader_of_the_past_takes_no_newer_copy(grown: Store, layout: Layout, data: Data) -> None:
    newest = grown.state(0)
    assert newest.place is not None
    past = grown.state(0, at=newest.place._replace(k=newest.records - 3).seq)
    now = grown.state(0)
    old = read_all(grown, now)[0]
    with open_writer(grown, layout=layout) as writer:
        collector = Collector(writer, ratio=1.2, floor=0)
        data.change(range(layout.partitions), 99)
        writer.commit(np.arange(layout.partitions), data, step=99)
        collector.collect()
    found, bad = read_all(grown, past)
    assert set(found) | set(bad) == set(range(layout.partitions))
    assert bad  # permanently gone, and not replaced by newer copies
    # Where old copies are gone, the newest state has newer ones, and says so.
    found, bad = read_all(grown, now)
    new = data.all(range(layout.partitions))
    assert bad == {}
    replaced = dict(zip(now.ids.tolist(), (step_of(now.version) == 99).tolist(), strict=True))
    assert found == {i: new[i] if replaced[i] else old[i] for i in new}
    assert any(replaced.values())


def test_an_older_copy_comes_from_the_sealed_state_when_the_log_is_collected(
    grown: Store, layout: Layout
) -> None:
    sealed = grown.state(0, at=sealed_sets([grown.state(0)])[0].seqs[0])
    was = read_all(grown, sealed)[0]
    collector = _collector(grown, layout)
    collector.collect()
    state = grown.state(0)
    newer = np.flatnonzero(state.version > sealed.version)
    older = older_copies(grown.log(0), newer, state)
    assert older is not None
    assert read_all(grown, older) == ({i: was[i] for i in newer.tolist()}, {})
    assert (older.version < state.version[newer]).all()
    collector._writer.close()


def test_damaged_copies_stay_where_they_are(grown: Store, layout: Layout) -> None:
    state = grown.state(0)
    victim = state.segments[int(state.segment[0])]
    path = grown.root / f"lanes/0/seg/{victim.name}"
    raw = bytearray(path.read_bytes())
    raw[victim.head] ^= 1
    path.write_bytes(raw)
    before = read_all(grown, state)
    assert before[1]
    collector = _collector(grown, layout)
    collector.collect()
    assert read_all(grown, grown.state(0)) == before
    assert path.exists()
    collector._writer.close()


def test_space_stays_within_the_ratio_whatever_the_pattern(store: Store) -> None:
    layout = build_layout([("w", "parameter", (TensorSpec("", "F32", (256, 1024)),))], rows={"w": 1})
    data = Data(layout)
    rng = np.random.default_rng(0)
    with open_writer(store, layout=layout) as writer:
        collector = Collector(writer, floor=0)
        writer.commit(np.arange(256), data, step=0, sealed=True, extras={"n": 0})
        for step in range(1, 60):
            # Some are saved all the time, some hardly ever.
            ids = np.unique((256 * rng.random(32) ** 3).astype(np.int64))
            writer.commit(ids, data, step=step, extras={"n": step})
            collector.settle()
            space = collector.space()
            assert space.total <= 2 * space.live + space.pinned
            on_disk = sum(p.stat().st_size for p in (store.root / "lanes").rglob("*") if p.is_file())
            assert abs(space.total - on_disk) < 0.02 * layout.nbytes
        assert collector.done.deleted_bytes > 0
    assert verify(store, read_data=True).problems == []


def test_a_writer_begins_another_term_when_its_records_are_many(
    store: Store, layout: Layout, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scarctl.store.gc.RECORDS", 10)
    with open_writer(store, layout=layout) as writer:
        collector = Collector(writer, floor=0)
        for step in range(40):
            writer.commit(np.arange(layout.partitions), data, step=step)
            collector.settle()
        log = store.log(0)
        numbers = log.terms()
        assert 2 < len(numbers) < 10
        assert writer.epoch == 1
        # Of the others what has closed them is left.
        assert [len(log.listed(*term)) for term in log.logs()[:-1]] == [1] * (len(numbers) - 1)
    assert verify(store, read_data=True).problems == []


def test_files_that_are_no_snapshots_are_refused(grown: Store, layout: Layout) -> None:
    create_snapshot(grown, "ok", sealed_sets([grown.state(0)])[0])
    path = grown.root / "snapshots/ok.json"
    good = path.read_bytes()
    for bad in (good[:-3], good.replace(b'"step":1', b'"step":2'), b"{}", b"", good + b" "):
        path.write_bytes(bad)
        with pytest.raises(Corruption):
            read_snapshot(grown, "ok")
        # It is unknown what it keeps, so nothing is collected.
        collector = _collector(grown, layout)
        with pytest.raises(Corruption):
            collector.collect()
        collector._writer.close()
        assert any("ok.json" in p.file for p in verify(grown, read_data=False).problems)
    path.write_bytes(good)
    assert read_snapshot(grown, "ok").step == 1
    assert verify(grown, read_data=True).problems == []
