"""Several states of one step: saved, replaced without a step, saved again, cut. What is called exact is one of them.

    python -m tests.adversarial.same_step            # random histories, then all mutants
    python -m tests.adversarial.same_step --cases 50 --seed 3

A history is a word of short actions on a real arena, queue, persister and store; the bytes of a partition
say of which moment it is. After each action everything that could be recovered is planned, from the store alone and
with the memory of the run. A mutant is scarctl without one of the comparisons of identities; each has to be caught.
Queues count from 1 again whenever another process puts hand-overs: numbers are not what tells states apart.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from scarctl.arena.arena import Arena
from scarctl.arena.queue import NEWEST, HandOverQueue
from scarctl.arena.staged import copy_out
from scarctl.errors import NoIntactCopy
from scarctl.persist.inherited import adopt_orphans, reconcile
from scarctl.policy.turns import Turn
from scarctl.recovery import plan as planning
from scarctl.recovery.plan import Plan, plan_partial, plan_rollback
from scarctl.state.identity import Identities
from scarctl.state.layout import Layout, TensorSpec, build_layout
from scarctl.state.version import step_of
from scarctl.store import ShardState, Store, StoreWriter, sealed_sets
from scarctl.store.record import Record
from scarctl.util.arrays import Ids
from tests.adversarial.same_step_mutants import MUTANTS
from tests.daemon.rig import Rig, values

ACTIONS = ("step", "write", "write", "full", "full", "part", "save", "save", "cut", "kill", "outlive", "back")
_MEMORY = Path("/dev/shm")


class Broken(Exception):
    """A state was called exact that is not."""


def _layout() -> Layout:
    """Return a layout of six partitions."""
    spec = TensorSpec("", "U8", (6, 2))
    return build_layout([("a", "parameter", (spec,))], rows={"a": 1})


class _Cut(Exception):
    """The saver dies at this point."""


class Alone:
    """A start of a job of one process, which counts no writes."""

    several = False

    def __init__(self, number: int) -> None:
        self.start = f"{number:032x}"

    def writes(self) -> int:
        """Return 0: no writes are counted."""
        return 0


class History:
    """A run, its saver, and the true states."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._folder, self._rng = folder, rng
        self._starts = 0
        self._content: dict[str, dict[int, int]] = {}
        self._sets: set[str] = set()
        (folder / "arenas").mkdir()
        self.rig = self._new()
        self.live = np.zeros(self.rig.layout.partitions, np.int64)
        self.step = self.moment = 0
        self.true: dict[int, set[tuple[int, ...]]] = {}
        """Every state that existed, by its step."""
        self._begin()
        self._change(step=True)

    def _new(self) -> Rig:
        folder, layout = self._folder, _layout()
        return Rig(folder / "store", folder / "arenas", layout=layout)

    def _begin(self) -> None:
        self._starts += 1
        self.names = Identities(Alone(self._starts))

    def _change(self, *, step: bool) -> None:
        """Begin a new moment, in which some partitions have changed."""
        self.moment += 1
        self.step += step
        some = np.array([self._rng.random() for _ in self.live])
        chosen = some < self._rng.choice((0.3, 0.7, 1.0))
        self.live[chosen] = self.moment
        self._note()

    def _note(self) -> None:
        self.true.setdefault(self.step, set()).add(tuple(self.live.tolist()))
        self.names.stepped(self.step)

    # -- actions -------------------------------------------------------------------------------------------------

    def do(self, action: str) -> None:
        """Do one action, then check everything."""
        getattr(self, f"_{action}")()
        self.look()

    def _step(self) -> None:
        self._change(step=True)

    def _write(self) -> None:
        self._change(step=False)

    def _copy(self, ids: Ids) -> None:
        arena = self.rig.arena
        version = self.rig.version(self.step)
        for i in ids.tolist():
            self.rig.copy(np.array([i]), self.step, int(self.live[i]))
        assert version == self.rig.version(self.step)
        arena.reach(self.step)

    def _full(self) -> None:
        """Do `Engine.seal` and the end of `Checkpoints.finish`, which may fail at any point."""
        arena = self.rig.arena
        there = np.array([min(values(arena, i), default=0) for i in range(self.live.size)])
        ids = np.flatnonzero((there != self.live % 251) | ~arena.intact())
        self._copy(ids)
        whole = self.names.of(self.step, arena.whole, changed=bool(ids.size), extras=bytes)
        done = self._rng.choice((0, 1, 2, 3, 3, 3, 3))
        if done > 0:
            arena.name_whole(whole)
        if done > 1:
            self._put(ids, whole)
        if done > 2:
            self.names.made()
        else:
            self.names.failed(arena.whole)
            adopt_orphans(arena, self.rig.queue)

    def _memory(self) -> None:
        """Do a memory checkpoint: `Engine.copy`, with what it sets aside for the store, and `Engine.hand_over`."""
        arena, queue, version = self.rig.arena, self.rig.queue, self.rig.version(self.step)
        there = np.array([min(values(arena, i), default=0) for i in range(self.live.size)])
        changed = np.flatnonzero((there != self.live % 251) | ~arena.intact())
        self._copy(changed)
        turn = self._rng.choice((Turn.NOTHING, Turn.PART, Turn.PART, Turn.WHOLE))
        ids = np.flatnonzero(arena.pending() & arena.intact())
        if turn is Turn.PART:
            ids = np.sort(np.array(self._rng.sample(ids.tolist(), len(ids) // 2), np.int64))
        staged = copy_out(arena, ids) if ids.size and turn is not Turn.NOTHING else None
        whole = self.names.of(self.step, arena.whole, changed=bool(changed.size), extras=bytes)
        extras = {"state": self.live.tolist()}
        queue.note(version=version, whole=whole, extras=extras)
        arena.name_whole(whole)
        arena.note_moment(version)
        self.names.made()
        if turn is Turn.NOTHING or (turn is Turn.PART and not ids.size):
            return
        before = queue.numbers() if turn is Turn.WHOLE else []
        named = whole if turn is Turn.WHOLE else ""
        queue.put(version=version, ids=ids, whole=named, extras=extras, staged=staged)
        for number in before:
            queue.remove(number)

    def _part(self) -> None:
        """Do `Engine.copy` and `Engine.hand_over` where memory has no room for rows that are set aside."""
        if any(one.sealed for one in self.rig.queue.pending()):
            return
        free = np.flatnonzero(~self.rig.arena.pending())
        ids = np.sort(np.array(self._rng.sample(free.tolist(), len(free) // 2), np.int64))
        if ids.size:
            self._copy(ids)
            self._put(ids, "")

    def _put(self, ids: Ids, whole: str) -> None:
        extras = {"state": self.live.tolist()}
        self.rig.queue.put(version=self.rig.version(self.step), ids=ids, whole=whole, extras=extras)

    def _save(self) -> None:
        rig = self.rig
        for number in rig.queue.numbers()[:1]:
            handover = rig.queue.read(number)
            rig.persist(number)
            if not handover.sealed or (rig.arena.whole, rig.arena.sealed) != (
                handover.whole,
                handover.version,
            ):
                continue
            if self._stored().extras_whole != handover.whole:
                raise Broken(f"the extras of hand-over {number} are no part of the state that it has sealed")

    def _cut(self) -> None:
        """Let the saver die after some commits, and another one take over."""
        left, original = self._rng.randrange(1, 3), StoreWriter.commit

        def commit(writer: StoreWriter, *args: object, **kwargs: object) -> Record:
            nonlocal left
            if not left:
                raise _Cut
            left -= 1
            return original(writer, *args, **kwargs)  # type: ignore[arg-type]

        with mock.patch.object(StoreWriter, "commit", commit), contextlib.suppress(_Cut):
            for number in self.rig.queue.numbers():
                self.rig.persist(number)
        self._again()

    def _again(self) -> None:
        rig = self.rig
        rig.die()
        self.rig = rig = self._new()
        reconcile(rig.arena, rig.queue, rig.writer.state, rig.writer.epoch)
        rig.arena.begin_epoch(rig.writer.epoch, again=True)

    def _kill(self) -> None:
        """Let the run die, perhaps with the machine, and continue from what remains."""
        if self._rng.random() < 0.5:
            self.rig.die()
            shutil.rmtree(self._folder / "arenas" / "run")
            self.rig = self._new()
        else:
            self._again()
        self._continue()

    def _outlive(self) -> None:
        """Let the run die in a copy. Its daemon saves the rest, and then frees the store for the next process."""
        rig, arena = self.rig, self.rig.arena
        if self._rng.random() < 0.5:  # what the saver has done last is a seal with the first number
            for number in rig.queue.numbers():
                rig.persist(number)
            rig.queue = HandOverQueue(arena.folder)
            self._full()
            self._save()
        self._change(step=self._rng.random() < 0.8)
        there = np.array([min(values(arena, i), default=0) for i in range(self.live.size)])
        changed = np.flatnonzero(there != self.live % 251)
        self._copy(changed[: self._rng.randrange(changed.size + 1)])
        rig.queue = HandOverQueue(arena.folder)
        adopt_orphans(arena, rig.queue)
        for number in rig.queue.numbers():
            rig.persist(number)
            self.look()
        if (arena.pending() & arena.intact()).any():
            raise Broken("the daemon has removed hand-overs whose copies are not durable")
        self._again()
        self._continue()

    def _continue(self) -> None:
        """Begin the next process with what can be recovered."""
        self._begin()
        adopt_orphans(self.rig.arena, self.rig.queue)
        try:
            plan = self._plan(self._stored(), self.rig.arena)
        except NoIntactCopy:
            self.rig.queue.clear()
            self.rig.arena.reset()
            return
        self._restore(plan)
        self.step = max(int(step_of(plan.version).max()), 0)
        self.moment += 1
        self._note()

    def _back(self) -> None:
        """Do `Session.recover("all", mode="rollback")`."""
        rig = self.rig
        for number in rig.queue.numbers():
            rig.persist(number)
        try:
            plan = plan_rollback(Store.open(rig.store.root), rig.layout, rig.shard_of, rig.arena)
        except NoIntactCopy:
            return
        self._restore(plan)
        assert plan.seq is not None
        rig.writer.roll_back(plan.seq)
        rig.arena.begin_epoch(rig.writer.epoch, again=True)
        rig.arena.mark_all_durable(plan.whole)
        rig.queue.remove(NEWEST)
        assert plan.step is not None
        self.step = plan.step
        self.names.turn()
        self._note()

    def _restore(self, plan: Plan) -> None:
        """Restore a plan into the arena, and from there into the live state."""
        rig = self.rig
        found = self._values(plan, rig.arena)
        rig.queue.unseal()
        rig.arena.unseal()
        far = np.flatnonzero(plan.tier != planning.MEMORY)
        for i in far.tolist():
            rig.copy(np.array([i]), 0, found[i])
            rig.arena.version[i] = plan.version[i]
            rig.arena.durable[i] = plan.version[i]
        if plan.consistent:
            rig.arena.name_whole(plan.whole)
        self.live = np.array(found)

    # -- looking -------------------------------------------------------------------------------------------------

    def _stored(self) -> ShardState:
        self._reader = Store.open(self.rig.store.root)
        return self._reader.state(0)

    def _plan(self, state: ShardState, arena: Arena | None) -> Plan:
        rig = self.rig
        return plan_partial(rig.everything, rig.layout, rig.shard_of, state, arena)

    def _content_of(self, state: ShardState) -> dict[int, int]:
        """Return the value of every partition after a record; each record is read once."""
        key = state.digest
        if key not in self._content:
            found = self._content[key] = {}
            for batch in self._reader.read(state, state.ids[state.saved], corrupt=[]):
                starts, stops = self.rig.layout.row_ranges(batch.ids)
                at = 0
                for i, rows in zip(batch.ids.tolist(), (stops - starts).tolist(), strict=True):
                    found[i] = int(batch.tensors[0][at : at + rows].ravel()[0])
                    at += rows
        return self._content[key]

    def _values(self, plan: Plan, arena: Arena | None) -> list[int]:
        """Return the values that executing a plan would give."""
        found = dict(self._content_of(plan.state))
        if arena is not None:
            found |= {i: min(values(arena, i)) for i in np.flatnonzero(plan.tier == planning.MEMORY).tolist()}
        return [found[i] for i in range(self.live.size)]

    def _check(self, plan: Plan, arena: Arena | None, what: str) -> None:
        if plan.consistent:
            assert plan.step is not None
            found = tuple(self._values(plan, arena))
            if found not in {tuple(v % 251 for v in state) for state in self.true.get(plan.step, ())}:
                raise Broken(f"{what} of step {plan.step} is exact, and was never: {found}")

    def look(self) -> None:
        """Raise Broken if a state is called exact that never existed."""
        rig, state = self.rig, self._stored()
        for arena in (None, rig.arena):
            with contextlib.suppress(NoIntactCopy):
                plan = self._plan(state, arena)
                self._check(plan, arena, "a partial recovery")
                self._extras(plan, arena, state)
        for one in sealed_sets([state]):
            if one.whole not in self._sets:
                self._sets.add(one.whole)
                self._check(self._plan(self._reader.state(0, at=one.seqs[0]), None), None, "a sealed set")
        with contextlib.suppress(NoIntactCopy):
            back = plan_rollback(self._reader, rig.layout, rig.shard_of, rig.arena)
            self._check(back, rig.arena, "a rollback")

    def _extras(self, plan: Plan, arena: Arena | None, stored: ShardState) -> None:
        """Do `restore._fetch`: exact with the newest extras."""
        saved = self.rig.store.read_extras(stored)
        newest: Any = None if saved is None else (saved[0], stored.extras_whole, saved[1])
        if arena is not None:
            for one in (self.rig.queue.moment(), *self.rig.queue.pending()):
                if (
                    one is not None
                    and one.extras is not None
                    and (newest is None or one.version >= newest[0])
                ):
                    newest = one.version, one.whole, one.extras
        if newest is None or not plan.consistent or plan.whole != newest[1]:
            return
        state, theirs = tuple(self._values(plan, arena)), [v % 251 for v in newest[2]["state"]]
        if state != tuple(theirs):
            raise Broken(f"extras of step {plan.step} are of another state")

    def close(self) -> None:
        """Close all files."""
        self.rig.die()


def explore(case: int, seed: int, length: int = 12, *, aside: bool = False) -> str:
    """Play one history; return the violation with the word that leads to it, or "".

    aside: with memory checkpoints, of which rows are set aside for the store.
    """
    rng = random.Random(f"{seed}/{case}")
    folder = Path(tempfile.mkdtemp(prefix="scarctl-same-", dir=_MEMORY if _MEMORY.is_dir() else None))
    word = []
    history = History(folder, rng)
    try:
        history.do("full")
        for _ in range(length):
            word.append(rng.choice(ACTIONS + ("memory",) * 4 if aside else ACTIONS))
            history.do(word[-1])
    except Broken as error:
        return f"{error}\n    case {case}, seed {seed}: full {' '.join(word)}"
    finally:
        history.close()
        shutil.rmtree(folder)
    return ""


def caught(mutant: str, cases: Iterable[int], seed: int) -> str:
    """Return the violation in the first history that reveals the mutant, or ""."""
    with MUTANTS[mutant]:
        found: Iterator[str] = (explore(case, seed) for case in cases)
        return next((broken for broken in found if broken), "")


def main(argv: Sequence[str] | None = None) -> int:
    """Explore and print. Return 1 if a state is wrongly called exact, or a mutant is not caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.adversarial.same_step", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    failed, started = 0, time.monotonic()
    for case in range(args.cases):
        broken = explore(case, args.seed, aside=case % 2 == 1)
        if broken:
            failed += 1
            print(broken, flush=True)  # noqa: T201
    for mutant in MUTANTS:
        broken = caught(mutant, range(args.cases), args.seed)
        failed += not broken
        print(f"caught: {mutant}: {broken}" if broken else f"NOT CAUGHT: {mutant}", flush=True)  # noqa: T201
    print(f"{args.cases} histories, {failed} failures, {time.monotonic() - started:.0f} s")  # noqa: T201
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
