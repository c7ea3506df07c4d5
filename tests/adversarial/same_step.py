"""Several states of one step: saved, replaced without a step, saved again, cut. What is called exact is one of them.

    python -m tests.adversarial.same_step            # random histories, then all mutants
    python -m tests.adversarial.same_step --cases 50 --seed 3

A history is a word of short actions on a real arena, persister and store; the bytes of a partition say of which moment
it is. After each action everything that could be recovered is planned, from the store alone and
with the memory of the run. A mutant is scarctl without one of the comparisons of identities; each has to be caught.
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
from scarctl.arena.extras import carry_extras, read_extras, write_extras
from scarctl.arena.slot import Slot
from scarctl.errors import NoIntactCopy, UsageError
from scarctl.persist import persister
from scarctl.persist.saver import reconcile
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
from tests.daemon.rig import Rig, fill, values

ACTIONS = (
    *("step", "write", "write", "full", "full", "memory", "memory", "save", "save", "busy"),
    *("cut", "kill", "outlive", "back"),
)
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

    def _changed(self) -> Ids:
        arena = self.rig.arena
        there = np.array([min(values(arena, i), default=0) for i in range(self.live.size)])
        return np.flatnonzero((there != self.live % 251) | ~arena.intact())

    def _begin_copy(self, changed: Ids) -> tuple[Slot, int]:
        """Do `Engine.copy`, without its last steps: the slot is not current yet."""
        arena, version = self.rig.arena, self.rig.version(self.step)
        begun = arena.begin_moment(flush=True)
        assert begun is not None
        slot, moment = begun
        arena.carry(np.delete(self.rig.everything, changed))
        for i in changed.tolist():
            slot.begin(np.array([i]))
            fill(slot, np.array([i]), int(self.live[i]))
            slot.end(np.array([i]), version, moment)
        return slot, moment

    def _checkpoint(self) -> None:
        """Do a memory checkpoint: `Engine.copy`, and `Engine.complete` without the request."""
        arena, changed = self.rig.arena, self._changed()
        slot, moment = self._begin_copy(changed)
        whole = self.names.of(self.step, arena.whole, changed=bool(changed.size), extras=bytes)
        if self._rng.random() < 0.2:  # it fails
            self.names.failed(arena.whole)
            return
        write_extras(arena.folder, slot.number, moment, {"state": self.live.tolist()})
        arena.flip(slot, moment, self.rig.version(self.step), whole)
        arena.reach(self.step)
        self.names.made()

    def _full(self) -> None:
        self._checkpoint()
        self.rig.arena.ask(whole=True)

    def _memory(self) -> None:
        self._checkpoint()
        arena, turn = self.rig.arena, self._rng.choice((Turn.NOTHING, Turn.PART, Turn.PART, Turn.WHOLE))
        if turn is Turn.WHOLE:
            arena.ask(whole=True)
        elif turn is Turn.PART:
            arena.ask(ids=np.array([i for i in range(self.live.size) if self._rng.random() < 0.5], np.int64))

    def _save(self) -> None:
        rig = self.rig
        if rig.arena.waits:
            rig.persist(rig.arena.asked)
        if rig.arena.kept != rig.arena.slot.moment or not rig.arena.whole or not rig.arena.kept:
            return
        if self._stored().extras_whole != rig.arena.whole:
            raise Broken("the extras are no part of the state that memory calls saved")

    def _busy(self) -> None:
        """Save from a slot that is held, while training flushes, which ends the hold."""
        commit, flushes = StoreWriter.commit, self._rng.choice((1, 2))

        def committing(writer: StoreWriter, ids: Ids, source: Any, **kwargs: Any) -> Record:
            def reading(*at: int) -> Any:
                nonlocal flushes
                found = bytes(source(*at)) if self._rng.random() < 0.5 else None
                while flushes:
                    flushes -= 1
                    self._change(step=self._rng.random() < 0.5)
                    self._checkpoint()
                return source(*at) if found is None else found

            return commit(writer, ids, reading, **kwargs)

        with (
            mock.patch.object(StoreWriter, "commit", committing),
            mock.patch.object(persister, "PRIVATE", 0),
            mock.patch.object(persister, "PARTS", 1 << 40),
        ):
            self._full()
            self._save()

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
            self.rig.persist(self.rig.arena.ask(whole=True))
        self._again()

    def _again(self) -> None:
        rig = self.rig
        rig.die()
        self.rig = rig = self._new()
        reconcile(rig.arena, rig.writer.state, rig.writer.epoch)
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
        self._change(step=self._rng.random() < 0.8)
        changed = self._changed()
        self._begin_copy(changed[: self._rng.randrange(changed.size + 1)])
        arena.adopt()
        if arena.waits:
            rig.persist(arena.asked)
            self.look()
        if arena.lacking():
            raise Broken("the daemon has ended, and the store lacks something of memory")
        self._again()
        self._continue()

    def _continue(self) -> None:
        """Begin the next process with what can be recovered."""
        self._begin()
        self.rig.arena.adopt()
        try:
            plan = self._plan(self._stored(), self.rig.arena)
        except NoIntactCopy:
            self.rig.arena.reset()
            return
        self._restore(plan)
        self.step = max(int(step_of(plan.version).max()), 0)
        self.moment += 1
        self._note()

    def _back(self) -> None:
        """Do `Session.recover("all", mode="rollback")`."""
        rig = self.rig
        if rig.arena.waits:
            rig.persist(rig.arena.asked)
        try:
            plan = plan_rollback(Store.open(rig.store.root), rig.layout, rig.shard_of, rig.arena)
        except NoIntactCopy:
            return
        self._restore(plan)
        assert plan.seq is not None
        rig.writer.roll_back(plan.seq)
        rig.arena.begin_epoch(rig.writer.epoch, again=True)
        rig.arena.mark_all_durable()
        assert plan.step is not None
        self.step = plan.step
        self.names.turn()
        self._note()

    def _restore(self, plan: Plan) -> None:
        """Restore a plan into the arena, and from there into the live state."""
        arena, found = self.rig.arena, self._values(plan, self.rig.arena)
        far = np.flatnonzero(plan.tier != planning.MEMORY)
        if far.size:
            begun = arena.begin_moment(flush=True)
            assert begun is not None
            slot, moment = begun
            before = arena.newest()
            near = np.delete(self.rig.everything, far)
            arena.carry(near)
            slot.version[near] = before[near]
            for i in far.tolist():
                fill(slot, np.array([i]), found[i])
            slot.end(far, plan.version[far], moment)
            whole = plan.whole if plan.consistent else ""
            if whole in ("", arena.whole):
                carry_extras(arena, moment)
            arena.flip(slot, moment, int(slot.version.max()), whole)
            arena.acknowledge(far, plan.version[far], slot.moments[far])
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
            one = read_extras(arena)
            if one is not None and one.tree is not None and (newest is None or one.version >= newest[0]):
                newest = one.version, one.whole, one.tree
        if newest is None or not plan.consistent or plan.whole != newest[1]:
            return
        state, theirs = tuple(self._values(plan, arena)), [v % 251 for v in newest[2]["state"]]
        if state != tuple(theirs):
            raise Broken(f"extras of step {plan.step} are of another state")

    def close(self) -> None:
        """Close all files."""
        self.rig.die()


def explore(case: int, seed: int, length: int = 12) -> str:
    """Play one history; return the violation with the word that leads to it, or ""."""
    rng = random.Random(f"{seed}/{case}")
    folder = Path(tempfile.mkdtemp(prefix="scarctl-same-", dir=_MEMORY if _MEMORY.is_dir() else None))
    word = []
    history = History(folder, rng)
    try:
        history.do("full")
        for _ in range(length):
            word.append(rng.choice(ACTIONS))
            history.do(word[-1])
    except (Broken, UsageError) as error:
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
        broken = explore(case, args.seed)
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
