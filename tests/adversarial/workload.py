"""Apply actions to a store while it is attacked, with a message before each action and after its acknowledgement.

A message is a dict for JSON, so that a process can send it to another. A partition's bytes follow from its number and
the *stamp* of the commit that saved it, so every reader of the messages knows all bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import Unavailable
from scarctl.state.encoding import decode, encode, parts
from scarctl.state.encodings import Encoding
from scarctl.state.version import epoch_of, step_of
from scarctl.store import (
    Collector,
    Store,
    StoreWriter,
    create_snapshot,
    delete_snapshot,
    open_writer,
    sealed_sets,
)
from scarctl.store.encoder import Encoder
from scarctl.store.prune import Retention, plan_prune, prune
from scarctl.store.snapshot import snapshot_names
from tests.store.helpers import make_finite, place, small_layout

LAYOUT = small_layout()
SHARDS = 2
SEED = 3

Message = dict[str, Any]
Tell = Callable[[Message], object]
Act = tuple[Any, ...]


@dataclass(frozen=True)
class Kind:
    """In how many bits copies may be stored."""

    encoding: Encoding = "exact"
    """Of some of the commits that seal nothing."""

    @cached_property
    def members(self) -> list[NDArray[np.int64]]:
        """The partitions of every lane."""
        return [np.arange(LAYOUT.partitions)]

    def create(self, url: str) -> Store:
        """Make the store if it does not exist."""
        return Store.create(url, shards=SHARDS, seed=SEED)


KINDS = (Kind(), Kind("int8"), Kind("bfloat16"))
"""What attacks take in turn."""


@lru_cache(maxsize=20_000)
def content(partition: int, stamp: int, encoding: Encoding = "exact") -> bytes:
    """Return the restored bytes of a partition as the commit of that stamp saved it."""
    g, start, stop = place(LAYOUT, partition)
    group = LAYOUT.groups[g]
    lengths = [(stop - start) * spec.row_bytes for spec in group.tensors]
    data = np.random.default_rng((partition, stamp)).integers(0, 256, sum(lengths), dtype=np.uint8)
    pieces = np.split(data, np.cumsum(lengths)[:-1])
    for piece, spec in zip(pieces, group.tensors, strict=True):
        make_finite(piece, spec)
    if encoding == "exact":
        return data.tobytes()
    stored = [encode(pieces[p.of], group.tensors[p.of], p) for p in parts(group, encoding)]
    return b"".join(piece.tobytes() for piece in decode(group, encoding, stored))


@dataclass(frozen=True)
class Begun:
    """A commit that was announced."""

    shard: int
    ids: NDArray[np.int64]
    steps: NDArray[np.int64]
    sealed: bool
    extras: Any
    encoding: Encoding


class Player:
    """One life of a process that writes to the store. Its random choices follow from `seed`."""

    def __init__(
        self,
        url: str,
        tell: Tell,
        *,
        seed: int = 0,
        stamp: int = 0,
        faulty: bool = False,
        kind: Kind = KINDS[0],
    ) -> None:
        """faulty: the disk may fail. A commit or a collection that failed is passed over; after anything else that
        failed the life ends.
        """
        self.url = url
        self.tell = tell
        self.rng = np.random.default_rng(seed)
        self.stamp = stamp
        self.faulty = faulty
        self.kind = kind
        self.step = 0
        self.sealing = False
        """A record that seals the last shard is being written."""
        self._tensors = [
            [np.zeros((s.rows, s.row_bytes), np.uint8) for s in g.tensors] for g in LAYOUT.groups
        ]
        self._writer: StoreWriter | None = None
        self._collector: Collector | None = None

    @property
    def writer(self) -> StoreWriter:
        assert self._writer is not None
        return self._writer

    def play(self, acts: Iterable[Act]) -> None:
        for name, *arguments in acts:
            try:
                getattr(self, name)(*arguments)
            except Unavailable:
                if not self.faulty:
                    raise
                if name not in ("turn", "collect"):
                    return

    def open(self) -> None:
        """Open the store, creating it if needed, and begin an epoch."""
        self.tell({"begin": "create"})
        store = self.kind.create(self.url)
        self.tell({"begin": "open"})
        self._writer = open_writer(store, layout=LAYOUT)
        self._collector = Collector(self._writer, ratio=1.2, floor=0, turn_bytes=9000)
        states = self._writer.states
        self.tell({"done": "open", "version": {s: states[s].version.tolist() for s in states}})
        self.step = max(0, *(state.step for state in states.values())) + 1

    def close(self) -> None:
        """Close everything, also after a kill: then the kernel would release the lock."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def commit(self, shard: int, share: float = 0.4, *, sealed: bool = False, extras: bool = False) -> None:
        log = shard % len(self.kind.members)
        self._commit([self._begin(log, share, sealed=sealed, extras=extras)])
        self.step += not sealed

    def together(self, share: float = 0.4, *, sealed: bool = False) -> None:
        """Commit all logs of one step at once, as for a hand-over."""
        logs = range(len(self.kind.members))
        begun = [self._begin(log, share, sealed=sealed, extras=sealed or not log) for log in logs]
        self.sealing = sealed
        self._commit(begun)
        self.sealing = False
        self.step += 1

    def sealed(self, share: float = 0.4) -> None:
        """Do the same as `seal`, for all logs at once."""
        self.together(share, sealed=True)

    def _begin(self, shard: int, share: float, *, sealed: bool, extras: bool) -> Begun:
        members = self.kind.members[shard]
        ids = np.sort(self.rng.permutation(members)[: int(len(members) * share)])
        state = self.writer.states[shard]
        if sealed:  # it must contain partitions that were never saved exactly
            ids = np.union1d(ids, state.ids[~state.saved | state.encoded])
        elif not len(ids):
            ids = members[:1]
        self.stamp += 1
        self._fill(ids.tolist())
        steps = np.full(len(ids), self.step)
        if not sealed and self.rng.random() < 0.3:  # some copies had to wait, as with a slow store
            saved = state.version[state.find(ids)]
            # After the saved step, because two contents of one version would look alike.
            least = np.where(
                epoch_of(saved) == self.writer.epoch, np.minimum(step_of(saved) + 1, self.step), 0
            )
            steps = self.rng.integers(least, self.step, endpoint=True)
        encoding: Encoding = "exact"
        if not sealed and self.kind.encoding != "exact" and self.rng.random() < 0.6:
            encoding = self.kind.encoding
        message = {
            "begin": "commit",
            "encoding": encoding,
            "shard": shard,
            "ids": ids.tolist(),
            "stamp": self.stamp,
        }
        message |= {"epoch": self.writer.epoch, "step": self.step, "steps": steps.tolist()}
        self.tell(message | {"sealed": sealed, "extras": extras})
        return Begun(shard, ids, steps, sealed, {"stamp": self.stamp} if extras else None, encoding)

    def _commit(self, begun: list[Begun]) -> None:
        def commit(one: Begun) -> BaseException | None:
            try:
                encoded = one.encoding != "exact"
                self.writer.commit(
                    one.ids,
                    Encoder(LAYOUT, one.encoding, self._source, one.ids) if encoded else self._source,
                    step=self.step,
                    steps=one.steps,
                    sealed=one.sealed,
                    extras=one.extras,
                )
            except BaseException as error:
                return error
            return None

        outcomes = [commit(one) for one in begun]
        faults = [fault for fault in outcomes if fault is not None]
        for one, outcome in zip(begun, outcomes, strict=True):
            if outcome is None:
                self.tell({"done": "commit", "shard": one.shard})
            elif isinstance(outcome, Unavailable) and self.faulty:
                self.tell({"failed": "commit", "shard": one.shard, "doubt": outcome.kind == "in-doubt"})
        raised = [fault for fault in faults if not (isinstance(fault, Unavailable) and self.faulty)]
        if raised:
            raise raised[0]

    def seal(self, share: float = 0.4) -> None:
        """Seal all logs at one step."""
        last = len(self.kind.members) - 1
        for log in range(last + 1):
            self.sealing = log == last
            self._commit([self._begin(log, share, sealed=True, extras=True)])
        self.sealing = False
        self.step += 1

    def snapshot(self, name: str) -> None:
        """Name the newest complete sealed set, if there is one and the name is free."""
        name_newest(self.writer.store, name, self.tell)

    def drop(self, name: str) -> None:
        drop(self.writer.store, name, self.tell)

    def turn(self) -> None:
        assert self._collector is not None
        self._collector.turn()

    def collect(self) -> None:
        assert self._collector is not None
        self._collector.collect()

    def back(self) -> None:
        """Roll back to the newest complete sealed set, if there is one."""
        newest = sealed_sets(self.writer.states.values())
        if newest:
            self.tell({"begin": "back", "to": [newest[0].epoch, newest[0].step]})
            self.writer.roll_back(newest[0].seqs[0])
            self.tell({"done": "back"})
            self.step = newest[0].step + 1

    def prune(self, *names: str) -> None:
        """Prune as the command does: without a writer of its own, deleting these snapshots if they exist."""
        self.close()
        store = Store.open(self.url)
        names = tuple(name for name in names if name in snapshot_names(store))
        for name in names:
            self.tell({"begin": "drop", "name": name})
        prune(store, plan_prune(store, Retention(delete=names)))
        for name in names:
            self.tell({"done": "drop", "name": name})

    def _fill(self, ids: list[int]) -> None:
        for i in ids:
            g, start, stop = place(LAYOUT, i)
            data, at = np.frombuffer(content(i, self.stamp), np.uint8), 0
            for array in self._tensors[g]:
                rows = array[start:stop]
                rows[:] = data[at : at + rows.size].reshape(rows.shape)
                at += rows.size

    def _source(self, group: int, tensor: int, start: int, stop: int) -> memoryview:
        return memoryview(self._tensors[group][tensor][start:stop])


def name_newest(store: Store, name: str, tell: Tell) -> None:
    """Make a snapshot of the newest complete sealed set, as any process may."""
    newest = sealed_sets(store.state(shard) for shard in store.shards())
    if newest and name not in snapshot_names(store):
        tell({"begin": "snapshot", "name": name, "of": [newest[0].epoch, newest[0].step]})
        try:
            create_snapshot(store, name, newest[0])
        except Unavailable as error:
            if error.kind != "snapshot-late":  # then it was removed again automatically
                raise
            tell({"begin": "drop", "name": name})
            tell({"done": "drop", "name": name})
            return
        tell({"done": "snapshot", "name": name})


def drop(store: Store, name: str, tell: Tell) -> None:
    """Delete a snapshot if it exists."""
    if name in snapshot_names(store):
        tell({"begin": "drop", "name": name})
        delete_snapshot(store, name)
        tell({"done": "drop", "name": name})


SCRIPT: tuple[tuple[Act, ...], ...] = (
    # A store is made, and filled.
    (("open",), ("seal", 1.0), ("commit", 0), ("commit", 1), ("snapshot", "a"), ("close",)),
    # Collection alongside commits; a snapshot goes, another comes.
    (
        ("open",),
        *(("commit", shard, 0.5) for _ in range(2) for shard in range(SHARDS)),
        ("seal", 0.5),
        ("turn",),
        ("together", 0.4),
        ("snapshot", "b"),
        ("turn",),
        ("turn",),
        ("drop", "a"),
        ("collect",),
        ("commit", 1),
    ),
    # Prune by hand between two epochs; the previous process has not closed the store.
    (("prune", "b"), ("open",), ("commit", 0), ("seal", 0.0), ("commit", 0), ("commit", 1)),
    # Roll back, and continue from there.
    (("open",), ("commit", 0), ("back",), ("sealed", 0.2), ("snapshot", "a"), ("collect",), ("close",)),
)
"""Lives of processes: each opens the store again. Together they do everything that a store supports."""


def draw(rng: np.random.Generator, length: int) -> list[Act]:
    """Draw a random life."""
    acts: list[Act] = [("open",)]
    kinds = (
        *("commit", "seal", "snapshot", "drop", "turn", "collect", "back", "prune", "reopen"),
        *("together", "sealed"),
    )
    odds = np.array([5, 2, 2, 1.5, 4, 2, 0.7, 0.7, 0.5, 3, 2])
    for kind in rng.choice(kinds, length, p=odds / odds.sum()).tolist():
        if kind == "commit":
            acts.append(("commit", int(rng.integers(SHARDS)), float(rng.choice([0.1, 0.4, 1.0]))))
        elif kind in ("seal", "sealed", "together"):
            acts.append((kind, float(rng.choice([0.0, 0.3, 1.0]))))
        elif kind in ("snapshot", "drop"):
            acts.append((kind, str(rng.choice(["a", "b"]))))
        elif kind == "prune":
            acts += [("prune", "a"), ("open",)]
        elif kind == "reopen":
            acts += [("close",), ("open",)]
        else:
            acts.append((kind,))
    return acts
