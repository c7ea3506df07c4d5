"""Compaction, collection and snapshots beside commits: what is kept stays as it was, what is not goes."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from scarctl.errors import ScarError, UsageError
from scarctl.store import (
    Collector,
    SealedSet,
    Store,
    StoreWriter,
    create_snapshot,
    delete_snapshot,
    sealed_sets,
    snapshots,
    verify,
)
from scarctl.version import pack
from tests.store.helpers import Data, memory_folder, read_all, small_layout, summary

LAYOUT = small_layout()
SHARDS = 2
SHARD_OF = LAYOUT.shards(SHARDS, 7)
MEMBERS = [np.flatnonzero(s == SHARD_OF) for s in range(SHARDS)]
NAMES = st.sampled_from(["a", "b.2", "C-3"])
Copies = dict[int, tuple[int, bytes]]


@dataclass
class Model:
    """What the store should hold: per partition version and bytes; sealed sets; snapshots."""

    copies: list[Copies] = field(default_factory=lambda: [{} for _ in range(SHARDS)])
    sealed: dict[tuple[int, int], tuple[SealedSet, list[Copies]]] = field(default_factory=dict)
    named: dict[str, tuple[SealedSet, list[Copies]]] = field(default_factory=dict)

    def frozen(self) -> list[Copies]:
        return [dict(copies) for copies in self.copies]


class SpaceMachine(RuleBasedStateMachine):
    """Random commits, compaction, collection, snapshots, roll-backs, kills and reopenings against dictionaries."""

    @initialize()
    def start(self) -> None:
        self.folder = memory_folder()
        self.store = Store.create(self.folder / "run", shards=SHARDS, seed=7)
        self.model = Model()
        self.data = Data(LAYOUT)
        self.step = self.seed = 0
        self._open()
        self.seal()

    def _open(self) -> None:
        self.writer: StoreWriter = self.store.writer(layout=LAYOUT, shard_of=SHARD_OF)
        self.collector = Collector(self.writer, ratio=1.2, floor=0, turn_bytes=20_000)

    @rule(shard=st.integers(0, SHARDS - 1), share=st.sampled_from([0.1, 0.3, 0.7]), ahead=st.integers(0, 3))
    def commit(self, shard: int, share: float, ahead: int) -> None:
        self.seed += 1
        self.step += ahead
        rng = np.random.default_rng(self.seed)
        ids = rng.permutation(MEMBERS[shard])[: int(len(MEMBERS[shard]) * share)]
        self.data.change(ids.tolist(), self.seed)
        self.writer.commit(
            shard, ids, self.data, step=self.step, extras={"n": self.seed} if self.seed % 3 else None
        )
        version = pack(self.writer.epoch, self.step)
        self.model.copies[shard].update({i: (version, self.data.partition(i)) for i in ids.tolist()})

    @rule()
    def seal(self) -> None:
        """Of all shards, at one step that no other set has."""
        self.seed += 1
        self.step += 1
        seqs = {}
        for shard, members in enumerate(MEMBERS):
            missing = [i for i in members.tolist() if i not in self.model.copies[shard]]
            record = self.writer.commit(
                shard,
                np.array(missing, np.int64),
                self.data,
                step=self.step,
                sealed=True,
                extras={"s": self.seed},
            )
            seqs[shard] = record.seq
            version = pack(self.writer.epoch, self.step)
            copies = {i: b for i, (_, b) in self.model.copies[shard].items()}
            self.model.copies[shard] = {
                i: (version, copies.get(i, self.data.partition(i))) for i in members.tolist()
            }
        sealed = SealedSet(self.writer.epoch, self.step, seqs)
        self.model.sealed[sealed.epoch, sealed.step] = (sealed, self.model.frozen())

    @rule(turns=st.integers(1, 4))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.collector.turn()

    @rule()
    def collect(self) -> None:
        self.collector.collect()
        for shard in range(SHARDS):
            assert self.collector._shards[shard].garbage == []
        assert verify(self.store, read_data=False).orphans == []

    @rule(name=NAMES)
    def snapshot(self, name: str) -> None:
        newest = self._newest()
        if name in self.model.named:
            with pytest.raises(UsageError, match="already"):
                create_snapshot(self.store, name, newest)
            return
        try:
            create_snapshot(self.store, name, newest)
        except ScarError as error:
            assert error.kind == "snapshot-late"
            assert any(self.writer.states[s].boundary > seq for s, seq in newest.seqs.items())
            return
        self.model.named[name] = self.model.sealed[newest.epoch, newest.step]

    @rule(name=NAMES)
    def delete_snapshot(self, name: str) -> None:
        if name in self.model.named:
            delete_snapshot(self.store, name)
            del self.model.named[name]
        else:
            with pytest.raises(UsageError, match="no snapshot"):
                delete_snapshot(self.store, name)

    # Whether there is a snapshot may depend on the sizes of files with times in them: nothing is drawn from the model.
    @rule(pick=st.integers(0, 11))
    def roll_back(self, pick: int) -> None:
        """To the newest sealed set, or to a snapshot, also one of an abandoned future."""
        kept = [self.model.sealed[self._newest().epoch, self._newest().step], *self.model.named.values()]
        sealed, copies = kept[pick % len(kept)]
        self.writer.roll_back(sealed.seqs)
        self.model.copies = [dict(of) for of in copies]
        # What was sealed after it is not a sealed set of this history any more.
        self.model.sealed = {
            key: found
            for key, found in self.model.sealed.items()
            if all((found[0].seqs[s], *key) in self.writer.states[s].sealed for s in range(SHARDS))
        }
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
        return sealed_sets(self.writer.states.values())[0]

    @invariant()
    def everything_kept_is_as_it_was(self) -> None:
        store = Store.open(self.store.url)
        for shard in range(SHARDS):
            state = store.state(shard, LAYOUT)
            assert summary(state) == summary(self.writer.states[shard])
            self._same(store, shard, None, self.model.copies[shard])
        newest = self._newest()
        assert (newest.epoch, newest.step) == max(self.model.sealed)
        kept = [self.model.sealed[newest.epoch, newest.step], *self.model.named.values()]
        for sealed, copies in kept:
            for shard, seq in sealed.seqs.items():
                self._same(store, shard, seq, copies[shard])
        assert {s.name: dict(s.seqs) for s in snapshots(store)} == {
            name: dict(sealed.seqs) for name, (sealed, _) in self.model.named.items()
        }

    def _same(self, store: Store, shard: int, at: int | None, copies: Copies) -> None:
        state = store.state(shard, LAYOUT, at=at)
        versions = {int(i): int(v) for i, v in zip(state.ids, state.version, strict=True)}
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


SpaceMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=16, deadline=None)
TestSpace = SpaceMachine.TestCase
