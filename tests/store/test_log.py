"""Test commits, epochs, roll-backs and indexes: the log's state is what the writer did."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from scarctl.errors import Corruption, LayoutMismatch, UsageError
from scarctl.state.layout import Layout, TensorSpec, build_layout
from scarctl.state.version import epoch_of, pack, step_of
from scarctl.store import Store, open_writer, verify
from scarctl.store.format import dump_json, index_path, record_path, segment_name, segment_path
from scarctl.store.index import INDEX_LEAST, dump_index
from scarctl.store.record import Record
from scarctl.store.segment_writer import write_segment
from scarctl.store.shard_state import Seal
from scarctl.store.writer import StoreWriter
from tests.store.helpers import Data, memory_folder, read_all, small_layout, summary
from tests.support.log_per_shard import store_with_a_log_per_shard

LAYOUT = small_layout()
SHARDS = 2
SHARD_OF = LAYOUT.shards(SHARDS, 7)
MEMBERS = [np.flatnonzero(s == SHARD_OF) for s in range(SHARDS)]


@dataclass
class Model:
    """The expected content of one shard."""

    copies: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    extras: tuple[int, object] | None = None
    sealed: list[tuple[int, int, int]] = field(default_factory=list)
    step: int = -1

    def copy(self) -> Model:
        return Model(dict(self.copies), self.extras, list(self.sealed), self.step)


class LogMachine(RuleBasedStateMachine):
    """Random commits, seals, roll-backs, reopenings and lost indexes against a dictionary."""

    @initialize()
    def start(self) -> None:
        self.folder = memory_folder()
        self.store = store_with_a_log_per_shard(self.folder / "run", shards=SHARDS, seed=7)
        self.writer: StoreWriter = open_writer(self.store, layout=LAYOUT, shard_of=SHARD_OF)
        self.data = Data(LAYOUT)
        self.models = [Model() for _ in range(SHARDS)]
        self.history: list[dict[int, Model]] = [{0: Model()} for _ in range(SHARDS)]
        self.step = 0
        self.seed = 0

    @rule(
        shard=st.integers(0, SHARDS - 1),
        share=st.sampled_from([0.05, 0.3, 1.0]),
        ahead=st.integers(0, 3),
        sealed=st.booleans(),
        extras=st.none() | st.integers(0, 9).map(lambda x: {"x": np.full(3, x), "t": (x,)}),
    )
    def commit(self, shard: int, share: float, ahead: int, sealed: bool, extras: object) -> None:
        self.seed += 1
        self.step += ahead
        model = self.models[shard]
        members = MEMBERS[shard]
        rng = np.random.default_rng(self.seed)
        ids = rng.permutation(members)[: int(len(members) * share)]
        if sealed and set(model.copies) | set(ids.tolist()) != set(members.tolist()):
            with pytest.raises(UsageError, match="cannot be sealed"):
                self.writer.commit(shard, ids, self.data, step=self.step, sealed=True)
            return
        if not len(ids) and extras is None and not sealed:
            return
        self.data.change(ids.tolist(), self.seed)
        record = self.writer.commit(shard, ids, self.data, step=self.step, sealed=sealed, extras=extras)
        state = self.writer.states[shard]
        # Otherwise an index should have been written.
        assert 2 * state.unindexed < len(state.ids) or state.unindexed_records < INDEX_LEAST
        version = pack(self.writer.epoch, self.step)
        model.copies.update({i: (version, self.data.partition(i)) for i in ids.tolist()})
        model.step = self.step
        if extras is not None:
            model.extras = (version, extras)
        if sealed:
            model.copies = {i: (version, b) for i, (_, b) in model.copies.items()}
            model.sealed.append(Seal(record.seq, record.epoch, record.step))
        self.history[shard][record.seq] = model.copy()

    @rule(
        pick=st.lists(st.integers(0, 1000), min_size=SHARDS, max_size=SHARDS),
        which=st.integers(1, 2**SHARDS - 1),
    )
    def roll_back(self, pick: list[int], which: int) -> None:
        seqs = {
            s: sorted(self.history[s])[pick[s] % len(self.history[s])]
            for s in range(SHARDS)
            if which >> s & 1
        }
        epoch = self.writer.epoch
        self.writer.roll_back(seqs)
        assert self.writer.epoch == epoch + 1
        for s, seq in seqs.items():
            self.models[s] = self.history[s][seq].copy()
        self._epoch_begun()
        self.step = 0

    @rule(clean=st.booleans(), lose=st.booleans())
    def reopen(self, clean: bool, lose: bool) -> None:
        if clean:
            self.writer.close()
        else:
            self.writer._lock.release()  # as if the process had been killed
        if lose:
            for s in range(SHARDS):
                shutil.rmtree(self.store.root / f"shards/{s}/index")
        self.store = Store.open(self.store.url)
        self.writer = open_writer(self.store, layout=LAYOUT, shard_of=SHARD_OF)
        self._epoch_begun()

    @rule(shard=st.integers(0, SHARDS - 1), byte=st.integers(0, 10**6))
    def damage_index(self, shard: int, byte: int) -> None:
        for path in sorted(self.store.root.glob(f"shards/{shard}/index/*"))[-1:]:
            raw = bytearray(path.read_bytes())
            raw[byte % len(raw)] ^= 4
            path.write_bytes(raw)
            assert any(p.file == str(path) for p in verify(self.store, read_data=False).problems)
            self._compare(shard)
            path.unlink()

    def _epoch_begun(self) -> None:
        for s in range(SHARDS):
            self.history[s][self.writer.states[s].seq] = self.models[s].copy()

    @invariant()
    def log_says_what_happened(self) -> None:
        for shard in range(SHARDS):
            self._compare(shard)

    def _compare(self, shard: int) -> None:
        model = self.models[shard]
        live = self.writer.states[shard]
        state = Store.open(self.store.url).state(shard, LAYOUT)
        assert summary(state) == summary(live)
        assert state.ids.tolist() == MEMBERS[shard].tolist()
        assert {int(i): int(v) for i, v in zip(state.ids, state.version, strict=True) if v >= 0} == {
            i: v for i, (v, _) in model.copies.items()
        }
        assert read_all(self.store, state) == ({i: b for i, (_, b) in model.copies.items()}, {})
        assert state.sealed == model.sealed
        assert state.step == model.step
        found = self.store.read_extras(state)
        assert repr(found) == repr(model.extras)
        seq = sorted(self.history[shard])[len(self.history[shard]) // 2]
        past = self.store.state(shard, at=seq)
        assert read_all(self.store, past)[0] == {
            i: b for i, (_, b) in self.history[shard][seq].copies.items()
        }

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
    shard_of = layout.shards(1, 0)
    with open_writer(store, layout=layout, shard_of=shard_of) as writer:
        writer.commit(0, np.arange(10), data, step=100)
    with open_writer(store, layout=layout, shard_of=shard_of) as writer:
        assert writer.epoch == 2
        writer.commit(0, np.arange(5), data, step=3)
        version = writer.states[0].version
        assert version[:5].min() > version[5:10].max()
        assert (epoch_of(version[:5]).tolist(), step_of(version[:5]).tolist()) == ([2] * 5, [3] * 5)
        with pytest.raises(UsageError, match="backwards"):
            writer.commit(0, np.arange(5), data, step=2)
    assert [r.kind for r in store.records(0)] == ["epoch", "commit", "epoch", "commit"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"ids": [0], "step": -1}, "step -1"),
        ({"ids": [0], "step": 2**40}, "step"),
        ({"ids": [0, 0], "step": 1}, "twice"),
        ({"ids": [10**6], "step": 1}, "not of shard"),
        ({"ids": [-1], "step": 1}, "not of shard"),
        ({"ids": [], "step": 1}, "nothing to commit"),
        ({"ids": [0], "step": 1, "shard": 9}, "no shard 9"),
        ({"ids": [0], "step": 1, "sealed": True}, "cannot be sealed"),
    ],
)
def test_bad_calls_write_nothing(
    store: Store, writer: StoreWriter, data: Data, call: dict, words: str
) -> None:
    before = sorted(p for p in store.root.rglob("*"))
    with pytest.raises(UsageError, match=words):
        writer.commit(call.pop("shard", 0), np.array(call.pop("ids"), np.int64), data, **call)
    assert sorted(p for p in store.root.rglob("*")) == before


def test_extras_that_cannot_be_stored_write_nothing(store: Store, writer: StoreWriter, data: Data) -> None:
    before = sorted(store.root.rglob("*"))
    with pytest.raises(UsageError, match="sched"):
        writer.commit(0, np.array([1]), data, step=0, extras={"sched": object()})
    assert sorted(store.root.rglob("*")) == before


def test_another_model_is_refused_and_nothing_is_written(store: Store, layout: Layout) -> None:
    with open_writer(store, layout=layout, shard_of=layout.shards(1, 0)):
        pass
    other = build_layout([("emb", "parameter", (TensorSpec("", "F32", (38, 3)),))])
    before = sorted(store.root.rglob("*"))
    with pytest.raises(LayoutMismatch, match="emb"):
        open_writer(store, layout=other, shard_of=other.shards(1, 0))
    assert sorted(store.root.rglob("*")) == before
    with pytest.raises(LayoutMismatch):
        store.state(0, other)


def test_opening_reads_one_index_and_the_records_after_it(
    store: Store, writer: StoreWriter, layout: Layout, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(27):
        writer.commit(0, np.arange(step, step + 3), data, step=step)
    state = writer.states[0]
    assert 0 < state.unindexed * 4 < layout.partitions
    opened: list[str] = []
    original = type(store.blobs).reader

    def counted(self: object, name: str) -> object:
        opened.append(name.split("/")[-2])
        return original(self, name)  # type: ignore[arg-type]

    monkeypatch.setattr(type(store.blobs), "reader", counted)
    store.state(0)
    assert opened.count("index") == 1
    assert opened.count("log") == state.unindexed_records + 1
    assert opened.count("seg") == state.unindexed_records


def test_older_copies_step_by_step(store: Store, writer: StoreWriter, data: Data) -> None:
    versions: list[dict[int, bytes]] = []
    ids = np.array([3, 4, 5])
    for step in range(4):
        data.change(range(10), step)
        writer.commit(0, ids if step else np.arange(10), data, step=step)
        versions.append(data.all(ids.tolist()))
    state = writer.states[0]
    for step in (2, 1, 0):
        older = store.older(0, ids, state)
        assert older is not None
        assert step_of(older.version).tolist() == [step] * 3
        assert read_all(store, older) == (versions[step], {})
        state = older
    assert store.older(0, ids, state) is None
    assert store.older(0, np.array([9]), writer.states[0]) is None
    mixed = store.older(0, np.array([3, 9]), writer.states[0])
    assert mixed is not None
    assert mixed.version.tolist() == [pack(1, 2), -1]


def test_a_commit_of_copies_of_several_steps(store: Store, writer: StoreWriter, data: Data) -> None:
    data.change(range(10), 1)
    writer.commit(0, np.arange(10), data, step=1)
    first = data.all([3, 4, 5])
    data.change([3, 4, 5], 2)
    ids, steps = np.array([3, 4, 5]), np.array([2, 4, 1])
    record = writer.commit(0, ids, data, step=5, steps=steps, extras={"step": 5})
    assert (record.mixed, record.version) == (True, pack(1, 5))
    for state in (writer.states[0], Store.open(store.root).state(0)):
        assert state.step == 5
        assert step_of(state.version[ids]).tolist() == steps.tolist()
        assert read_all(store, state)[0].items() >= data.all([3, 4, 5]).items()
        extras = store.read_extras(state)
        assert extras is not None
        assert (extras[0], extras[1]) == (pack(1, 5), {"step": 5})
    writer.commit(0, np.array([4]), data, step=6)
    older = store.older(0, np.array([4]), writer.states[0])
    assert older is not None
    assert step_of(older.version).tolist() == [4]
    oldest = store.older(0, np.array([4]), older)
    assert oldest is not None
    assert read_all(store, oldest) == ({4: first[4]}, {})
    assert verify(store, read_data=True).intact


def test_a_sealed_commit_of_copies_of_several_steps_is_of_its_step(
    store: Store, writer: StoreWriter, layout: Layout, data: Data
) -> None:
    everything = np.arange(layout.partitions)
    steps = everything % 4
    writer.commit(0, everything, data, step=3, steps=steps, sealed=True)
    for state in (writer.states[0], Store.open(store.root).state(0)):
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
    writer.commit(0, np.arange(10), data, step=1)
    with pytest.raises(UsageError, match=what):
        writer.commit(0, np.array([3, 4, 5]), data, step=5, steps=np.array(steps))
    assert writer.states[0].seq == Store.open(store.root).state(0).seq == 1


@pytest.mark.parametrize("change", [{"kind": "compact"}, {"format": 1}, {"segment": None, "partitions": 0}])
def test_a_record_that_cannot_have_copies_of_several_steps(
    writer: StoreWriter, data: Data, change: dict[str, object]
) -> None:
    record = writer.commit(0, np.array([3, 4]), data, step=5, steps=np.array([3, 5]))
    obj = {**record.to_json(), **change}
    with pytest.raises(Corruption, match="only a commit of format 2"):
        Record.parse(dump_json(obj), "record", shard=0, seq=record.seq)


def test_an_older_copy_has_the_version_of_the_seal_above_it(
    store: Store, writer: StoreWriter, layout: Layout, data: Data
) -> None:
    writer.commit(0, np.arange(layout.partitions), data, step=0, sealed=True)
    writer.commit(0, np.array([1]), data, step=5, sealed=True)
    writer.commit(0, np.array([2]), data, step=7)
    older = store.older(0, np.array([1, 2]), writer.states[0])
    assert older is not None
    assert step_of(older.version).tolist() == [0, 5]


def test_older_does_not_see_what_was_rolled_back(store: Store, writer: StoreWriter, data: Data) -> None:
    writer.commit(0, np.arange(5), data, step=0)
    base = writer.states[0].seq
    writer.commit(0, np.arange(5), data, step=9)
    writer.roll_back({0: base})
    writer.commit(0, np.arange(5), data, step=1)
    older = store.older(0, np.arange(5), writer.states[0])
    assert older is not None
    assert older.version.tolist() == [pack(1, 0)] * 5
    with pytest.raises(UsageError):
        writer.roll_back({0: 99})


def test_members_may_change_when_the_store_is_opened(store: Store, layout: Layout, data: Data) -> None:
    half = np.where(np.arange(layout.partitions) < 20, 0, -1).astype(np.int32)
    with open_writer(store, layout=layout, shard_of=half) as writer:
        writer.commit(0, np.arange(20), data, step=0)
    moved = np.where(np.arange(layout.partitions) < 10, 0, 1).astype(np.int32)
    with open_writer(store, layout=layout, shard_of=moved) as writer:
        assert writer.states[0].ids.tolist() == list(range(10))
        assert not writer.states[1].saved.any()
        live = {s: summary(writer.states[s]) for s in (0, 1)}
    assert {s: summary(store.state(s)) for s in (0, 1)} == live
    assert read_all(store, store.state(0)) == (data.all(range(10)), {})
    # A shard without an owner keeps its members, and gets the new epoch.
    with open_writer(store, layout=layout, shard_of=np.zeros(layout.partitions, np.int32)) as writer:
        assert writer.states[1].epoch == 3
        assert len(writer.states[1].ids) == layout.partitions - 10


def test_usage_counts_files_and_live_bytes(
    store: Store, writer: StoreWriter, layout: Layout, data: Data
) -> None:
    writer.commit(0, np.arange(layout.partitions), data, step=0)
    writer.commit(0, np.arange(3), data, step=1)
    usage = store.usage(writer.states)
    assert usage["live_bytes"] == layout.nbytes
    assert (usage["records"], usage["segments"]) == (3, 3)
    on_disk = sum(p.stat().st_size for p in store.root.rglob("*") if p.is_file() and p.name != "lock")
    assert usage["bytes"] == on_disk


def test_a_compacting_record_moves_copies_without_making_them_newer(
    store: Store, writer: StoreWriter, layout: Layout, data: Data
) -> None:
    """Records of kind "compact" are written by later versions; this version reads them."""
    for step in range(3):
        writer.commit(0, np.arange(step, step + 4), data, step=step)
    before = writer.states[0]
    ids = np.arange(6)
    name = segment_name(1, "a" * 32)
    with store.blobs.writer(segment_path(0, name)) as out:
        ref, _ = write_segment(out, name, layout, ids, data, {}, kind="compact", versions=before.version[ids])
        out.commit()
    record = Record(
        seq=before.seq + 1, shard=0, kind="compact", epoch=1, step=2, parent=before.tail_digest,
        layout=layout.digest, segment=ref, partitions=6,
    )  # fmt: skip
    store.blobs.create_exclusive(record_path(0, record.seq), [record.data])
    after = store.state(0)
    assert after.version.tolist() == before.version.tolist()
    assert {after.segments[s].name for s in after.segment[:6].tolist()} == {name}
    assert read_all(store, after) == (data.all(range(6)), {})
    assert verify(store, read_data=True).intact


def test_a_log_whose_beginning_was_collected_opens_from_its_boundary(
    store: Store, writer: StoreWriter, layout: Layout, data: Data
) -> None:
    """Garbage collection comes with later versions; this version reads the stores that they leave."""
    writer.commit(0, np.arange(layout.partitions), data, step=0, sealed=True)
    state = writer.states[0]
    tip = dataclasses.replace(store.log(0).record(1), boundary=1)
    (store.root / record_path(0, 0)).unlink()
    (store.root / record_path(0, 1)).unlink()
    shutil.rmtree(store.root / "shards/0/index")
    store.blobs.prepare("shards/0/index")
    store.blobs.create_exclusive(record_path(0, 1), [tip.data])
    with pytest.raises(Corruption, match="index"):
        store.state(0)
    state.tail_digest = tip.digest
    store.blobs.create_exclusive(index_path(0, 1), dump_index(state))
    assert read_all(store, store.state(0)) == (data.all(range(layout.partitions)), {})
    assert verify(store, read_data=True).problems == []
    writer.close()
    with open_writer(store, layout=layout, shard_of=layout.shards(1, 0)) as writer:
        writer.commit(0, np.arange(3), data, step=1)
    assert [r.boundary for r in store.records(0)] == [1, 1, 1]
    assert store.state(0).seq == 3
