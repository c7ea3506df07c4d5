"""Provide writers for attacks: each plays a script, and asks before every operation on a file."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from scarctl.errors import Contention, Fenced, ScarError, Unavailable, UsageError
from scarctl.state.layout import Layout, TensorSpec, build_layout
from scarctl.store import (
    Collector,
    Store,
    StoreWriter,
    create_snapshot,
    delete_snapshot,
    open_writer,
    sealed_sets,
)
from scarctl.store.backends.base import BlobWriter, Buffer, InDoubt, as_bytes
from scarctl.store.backends.client import Refused
from scarctl.store.backends.remote_errors import Fault, Meaning
from scarctl.store.snapshot import snapshot_names
from tests.adversarial.history import History, Violated
from tests.store.helpers import Data, read_all

SHARDS = 2
_WATCHED = ("has", "top", "read", "files", "names", "folders", "delete", "prepare")

Gate = Callable[[str], None]


def tiny_layout() -> Layout:
    """Return a layout of eight partitions in two groups."""
    return build_layout(
        [
            ("a", "parameter", (TensorSpec("", "F32", (6, 2)), TensorSpec("m", "F32", (6, 2)))),
            ("b", "parameter", (TensorSpec("", "U8", (4, 5)),)),
        ],
        rows={"a": 1, "b": 2},
        optimizer="SGD",
    )


LAYOUT = tiny_layout()


class Watched:
    """Blobs that call `gate` before every operation, and between a creation and its answer. `lossy`: probability that
    this answer is lost.
    """

    def __init__(self, actor: Actor, inner: Any, gate: Gate, lossy: float, rng: random.Random) -> None:
        self.actor, self.inner, self.gate = actor, inner, gate
        for name in _WATCHED:
            setattr(self, name, self._watched(name))

        def lose(error: Exception) -> None:
            gate("answer")
            if rng.random() < lossy:
                raise error

        if hasattr(inner, "_once"):
            once = inner._once

            def remote(*args: Any, **kwargs: Any) -> Any:
                found = once(*args, **kwargs)
                if kwargs.get("mode") == "create":
                    lose(Refused(Fault(Meaning.BROKEN, "lost")))
                return found

            inner._once = remote
        else:
            sync = inner._sync_visible

            def local(path: Any) -> None:
                lose(InDoubt("the folder's fsync has failed"))
                sync(path)

            inner._sync_visible = local

    def _watched(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.gate(name)
            return getattr(self.inner, name)(*args, **kwargs)

        return call

    @contextmanager
    def reader(self, name: str) -> Iterator[Any]:
        self.gate("reader")
        with self.inner.reader(name) as file:
            self.gate("ranges")
            yield file

    @contextmanager
    def writer(self, name: str) -> Iterator[BlobWriter]:
        self.gate("writer")
        with self.inner.writer(name) as out:
            commit = out.commit

            def gated() -> None:
                self.gate("commit")
                commit()

            out.commit = gated
            yield out

    def create_exclusive(self, name: str, parts: Sequence[Buffer]) -> None:
        self.gate("create")
        data = b"".join(as_bytes(part) for part in parts)
        self.actor.history.tried(name, data, self.actor.pending)
        self.inner.create_exclusive(name, parts)

    def settle(self, name: str, data: bytes) -> bool:
        self.gate("settle")
        there: bool = self.inner.settle(name, data)
        return there

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Actor:
    """One writer. `play` executes a script of words; see the methods `_do_*`."""

    def __init__(
        self, name: str, store: Store, history: History, seed: int, *, gate: Gate, lossy: float = 0
    ) -> None:
        self.name = name
        self.history = history
        self.rng = random.Random(seed)
        self.data = Data(LAYOUT, seed)
        self.pending: dict[int, bytes] = {}
        self.store = store
        self.writer: StoreWriter | None = None
        self.counts: Counter[str] = Counter()
        self.lost: str | None = None
        """Why it is no longer a writer."""
        store.blobs = Watched(self, store.blobs, gate, lossy, self.rng)

    def play(self, script: Sequence[str]) -> None:
        """Play the script. Raises Violated, and any error that a writer must not raise."""
        try:
            for word in script:
                try:
                    getattr(self, f"_do_{word}")()
                except InDoubt:
                    self.counts["in doubt"] += 1
                except (Fenced, Contention):
                    raise
                except Unavailable as error:
                    if error.kind != "snapshot-late":
                        raise
                    self.counts["late snapshots"] += 1
        except (Fenced, Contention) as error:
            self.lost = type(error).__name__
            self.counts[self.lost] += 1
        except ScarError as error:
            # A stopped collector may find its files gone. Then it must have been fenced.
            self.counts[f"{type(error).__name__} before it was fenced"] += 1
            self.lost = "Fenced"
            if set(snapshot_names(self.store)) - self.history.promised.keys():
                self.counts["stopped by a half-made snapshot"] += 1  # which is to be deleted, says the error
            elif self.writer is not None and self.is_writer():
                raise Violated(f"{self.name}, which is no zombie: {type(error).__name__}: {error}") from error

    def is_writer(self) -> bool:
        """Return whether it can still commit; its commits must then not be lost."""
        if self.writer is None:
            return False
        try:
            for _ in range(32):  # answers are lost: how often in a row is random
                with contextlib.suppress(InDoubt):
                    self._do_commit()
                    return True
        except (Fenced, Contention):
            return False
        except Unavailable:
            return False  # its roll-back did not finish, and it reports so permanently
        raise Violated(f"{self.name}: in doubt for ever")

    def _commit(self, ids: Any, *, sealed: bool) -> None:
        assert self.writer is not None
        step = self.writer.state.step + 1
        self.data.change(ids.tolist(), self.rng.getrandbits(32))
        self.pending = self.data.all(ids.tolist())
        extras = {"step": step} if self.rng.random() < 0.3 else None
        record = self.writer.commit(ids, self.data, step=step, sealed=sealed, extras=extras)
        self.history.acknowledged.append((self.name, record.digest))
        self.counts["acknowledged"] += 1

    def _do_open(self) -> None:
        if self.store.address.root is not None:
            (self.store.root / "lock").unlink(missing_ok=True)  # the lock is lost
        self.writer = open_writer(self.store, layout=LAYOUT)

    def _do_commit(self) -> None:
        if self.writer is not None:
            self._commit(np.arange(LAYOUT.partitions)[self.rng.randrange(2) :: 2], sealed=False)

    def _do_seal(self) -> None:
        if self.writer is not None:
            self._commit(np.arange(LAYOUT.partitions), sealed=True)

    def _do_collect(self) -> None:
        if self.writer is not None:
            collector = Collector(self.writer, floor=0, ratio=1.1)
            collector.collect()
            self.counts["files deleted"] += collector.done.deleted_files

    def _do_turn(self) -> None:
        if self.writer is not None:
            Collector(self.writer, floor=0, ratio=1.1, turn_bytes=100).turn()

    def _do_renew(self) -> None:
        if self.writer is not None:
            self.writer.renew()

    def _do_back(self) -> None:
        if self.writer is not None:
            sets = sealed_sets([self.writer.state])
            if sets:
                with contextlib.suppress(UsageError):  # of another writer's past, refused
                    self.writer.roll_back(sets[-1 if self.rng.random() < 0.5 else 0].seqs[0])
                    self.counts["rolled back"] += 1

    def _do_snap(self) -> None:
        sets = sealed_sets(self.store.state(shard) for shard in self.store.shards())
        if sets:
            name = f"{self.name}-{self.counts['snapshots']}".replace(" ", "-")
            try:
                snapshot = create_snapshot(self.store, name, sets[0])
            except InDoubt:
                delete_snapshot(self.store, name)
                raise
            self.history.promised[name] = dict(snapshot.seqs)
            self.counts["snapshots"] += 1

    def _do_drop(self) -> None:
        for name in list(self.history.promised)[:1]:
            del self.history.promised[name]
            with contextlib.suppress(UsageError):  # another writer was faster
                delete_snapshot(self.store, name)

    def _do_read(self) -> None:
        """Check that a reader gets every partition as some writer tried to commit it."""
        for shard in self.store.shards():
            found, bad = read_all(self.store, self.store.state(shard))
            if bad:
                raise Violated(f"a reader of shard {shard}: {next(iter(bad.items()))}")
            tried = {
                (i, data) for _, contents in self.history.records.values() for i, data in contents.items()
            }
            if not found.items() <= tried:
                raise Violated(f"a reader of shard {shard} got what nobody committed")
        self.counts["readings"] += 1

    def _do_close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None


class Baton:
    """Lets one of several threads run at a time. A schedule determines which one, and for how many operations."""

    def __init__(self, schedule: Sequence[tuple[int, int]], actors: int) -> None:
        self._schedule = list(schedule) + [(i, 1 << 60) for i in range(actors)]
        self._may_run = [threading.Semaphore(0) for _ in range(actors)]
        self._over = [False] * actors
        self._left = 0
        self.switches = 0

    def gate(self, me: int) -> Gate:
        def step(_: str) -> None:
            self._left -= 1
            if self._left < 0 and not all(self._over):
                self._next()
                self._may_run[me].acquire()

        return step

    def _next(self) -> int:
        while self._schedule:
            actor, self._left = self._schedule.pop(0)
            if not self._over[actor]:
                self._left -= 1
                self.switches += 1
                self._may_run[actor].release()
                return actor
        return -1

    def run(self, work: Sequence[Callable[[], None]]) -> list[BaseException | None]:
        """Run each function of `work` in its own thread, and return what they raised."""
        raised: list[BaseException | None] = [None] * len(work)

        def body(me: int) -> None:
            self._may_run[me].acquire()
            try:
                work[me]()
            except BaseException as error:
                raised[me] = error
            self._over[me] = True
            self._next()

        threads = [threading.Thread(target=body, args=(me,), daemon=True) for me in range(len(work))]
        for thread in threads:
            thread.start()
        self._next()
        for thread in threads:
            thread.join()
        return raised
