"""Apply actions to a store while it is attacked, with a message before each action and after its acknowledgement.

A message is a dict for JSON, so that a process can send it to another. A partition's bytes follow from its number and
the *stamp* of the commit that saved it, so every reader of the messages knows all bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np

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
EVERYTHING = np.arange(LAYOUT.partitions)
SHARDS = 2
SEED = 3

Message = dict[str, Any]
Tell = Callable[[Message], object]
Act = tuple[Any, ...]


KINDS: tuple[Encoding, ...] = ("exact", "int8", "bfloat16")
"""The encodings, of some of the commits that seal nothing, which attacks take in turn."""


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
        encoding: Encoding = "exact",
    ) -> None:
        """faulty: the disk may fail. A commit or a collection that failed is passed over; after anything else that
        failed the life ends.
        """
        self.url = url
        self.tell = tell
        self.rng = np.random.default_rng(seed)
        self.stamp = stamp
        self.faulty = faulty
        self.encoding = encoding
        self.step = 0
        self.sealing = False
        """A record that seals is being written."""
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
        store = Store.create(self.url, shards=SHARDS, seed=SEED)
        self.tell({"begin": "open"})
        self._writer = open_writer(store, layout=LAYOUT)
        self._collector = Collector(self._writer, ratio=1.2, floor=0, turn_bytes=9000)
        self.tell({"done": "open", "version": self.writer.state.version.tolist()})
        self.step = max(0, self.writer.state.step) + 1

    def close(self) -> None:
        """Close everything, also after a kill: then the kernel would release the lock."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def commit(self, share: float = 0.4, *, extras: bool = False) -> None:
        """Commit a part of the partitions."""
        self._commit(share, sealed=False, extras=extras)

    def seal(self, share: float = 0.4) -> None:
        """Commit the whole state: a part of the partitions, and all that were never saved exactly."""
        self.sealing = True
        self._commit(share, sealed=True, extras=True)
        self.sealing = False

    def _commit(self, share: float, *, sealed: bool, extras: bool) -> None:
        state = self.writer.state
        ids = np.sort(self.rng.permutation(EVERYTHING)[: int(len(EVERYTHING) * share)])
        if sealed:
            ids = np.union1d(ids, state.ids[~state.saved | state.encoded])
        elif not len(ids):
            ids = EVERYTHING[:1]
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
        encoded = not sealed and self.encoding != "exact" and self.rng.random() < 0.6
        encoding: Encoding = self.encoding if encoded else "exact"
        message = {"begin": "commit", "encoding": encoding, "ids": ids.tolist(), "stamp": self.stamp}
        message |= {"epoch": self.writer.epoch, "step": self.step, "steps": steps.tolist()}
        self.tell(message | {"sealed": sealed, "extras": extras})
        try:
            self.writer.commit(
                ids,
                Encoder(LAYOUT, encoding, self._source, ids) if encoded else self._source,
                step=self.step,
                steps=steps,
                sealed=sealed,
                extras={"stamp": self.stamp} if extras else None,
            )
        except Unavailable as error:
            if not self.faulty:
                raise
            self.tell({"failed": "commit", "doubt": error.kind == "in-doubt"})
        else:
            self.tell({"done": "commit"})
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
        newest = sealed_sets([self.writer.state])
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
    newest = sealed_sets([store.state(0)])
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
    (("open",), ("seal", 1.0), ("commit",), ("commit",), ("snapshot", "a"), ("close",)),
    # Collection alongside commits; a snapshot goes, another comes.
    (
        ("open",),
        *[("commit", 0.5)] * 4,
        ("seal", 0.5),
        ("turn",),
        ("commit",),
        ("snapshot", "b"),
        ("turn",),
        ("turn",),
        ("drop", "a"),
        ("collect",),
        ("commit",),
    ),
    # Prune by hand between two epochs; the previous process has not closed the store.
    (("prune", "b"), ("open",), ("commit",), ("seal", 0.0), ("commit",), ("commit",)),
    # Roll back, and continue from there.
    (("open",), ("commit",), ("back",), ("seal", 0.2), ("snapshot", "a"), ("collect",), ("close",)),
)
"""Lives of processes: each opens the store again. Together they do everything that a store supports."""


def draw(rng: np.random.Generator, length: int) -> list[Act]:
    """Draw a random life."""
    acts: list[Act] = [("open",)]
    kinds = ("commit", "seal", "snapshot", "drop", "turn", "collect", "back", "prune", "reopen")
    odds = np.array([8, 4, 2, 1.5, 4, 2, 0.7, 0.7, 0.5])
    for kind in rng.choice(kinds, length, p=odds / odds.sum()).tolist():
        if kind == "commit":
            acts.append((kind, float(rng.choice([0.1, 0.4, 1.0]))))
        elif kind == "seal":
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
