"""Runs that move between hosts, and stores that are copied, replaced and rolled back: memory of another line is no
memory.

    python -m tests.adversarial.hosts --seconds 600 --seed 0
    python -m tests.adversarial.hosts --mutants

A host is a folder of arenas. Processes are real: each resumes, trains a few steps, and closes or dies by SIGKILL; those
with a daemon leave it behind, or take it along. Every value is the number of the life and step that made it, so whoever
knows where a life began knows what every value descends from. What a life resumes has to descend from what the store
alone says, partition by partition, and to come from there or from this host's memory of that very state; memory that
nobody has contradicted has to be used.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from scarctl.arena import kinship
from scarctl.errors import ScarError
from scarctl.persist import saver
from scarctl.store import Store
from scarctl.store.backends.address import Address
from scarctl.store.prune import Retention, plan_prune, prune
from tests.adversarial.host_lives import NEVER, ROWS, STEPS, Plan, Told, Values, Violation, kill_daemon, live


def stored(path: Path) -> tuple[Values, tuple[str, ...]]:
    """Return the values of a store, and the identity of this state: the record that last changed each shard."""
    try:
        store = Store.open(path)
    except ScarError:
        return (NEVER,) * ROWS, ()
    values, marks = np.full(ROWS, NEVER), []
    for shard in store.shards():
        state = store.state(shard)
        corrupt: list[Any] = []
        for batch in store.read(state, state.ids[state.saved], corrupt=corrupt):
            values[batch.ids] = np.stack([t.view(np.float64) for t in batch.tensors])[0, :, 0]
        if corrupt:
            raise Violation(f"{path}: {corrupt[0][1]}")
        marks.append(str(state.line))
    return tuple(values.tolist()), tuple(marks)


@dataclass
class World:
    """Stores, hosts, and what is known about them."""

    folder: Path
    lives: int = 0
    past: dict[int, frozenset[float]] = field(default_factory=dict)
    """By life: the state with which it began, and its ancestors."""
    left: dict[tuple[str, str], tuple[tuple[str, ...], Values]] = field(default_factory=dict)
    """By store and host: the store's state when a process died there, and the process's memory."""
    begun: set[tuple[int, Values]] = field(default_factory=set)
    """Mixed states from which lives have continued, with their steps."""
    counts: Counter[str] = field(default_factory=Counter)
    journal: list[str] = field(default_factory=list)

    def way(self, value: float) -> frozenset[float]:
        """Return a value, and all its ancestors."""
        life, step = divmod(int(value), STEPS)
        if value == 0:
            return frozenset([0.0])
        if value != int(value) or life not in self.past:
            raise Violation(f"{value} was made by nobody")
        first = max((int(v) % STEPS for v in self.past[life]), default=0)
        return self.past[life] | {float(life * STEPS + s) for s in range(min(first, step), step + 1)} | {0.0}

    def run(self, store: str, host: str, plan: Plan) -> Told:
        """Run one life, and check everything that must hold for it."""
        self.lives += 1
        self.journal.append(f"life {self.lives}: {store} on {host}: {plan}")
        path, base = self.folder / store, self.folder / host
        base.mkdir(exist_ok=True, mode=0o700)
        alone, mark = stored(path)
        told = live(path, base, self.lives, plan)
        self.journal.append(f"    from {told.step}, consistent: {told.consistent}{told.error}")
        self.counts["lives"] += 1
        self.past[self.lives] = frozenset()
        at_death, memory = self.left.pop((store, host), ((), ()))
        if at_death != mark:
            self.counts["memory of another line"] += bool(memory)
            memory = ()
        if told.error:
            if told.error not in ("no-sealed-state", "no-intact-copy"):
                raise Violation(f"life {self.lives} could not resume: {told.error}")
            self.counts["no way back"] += 1
        elif told.found:
            self._judge(told, alone, memory, plan)
            self.past[self.lives] = frozenset().union(*(self.way(v) for v in told.values))
        elif NEVER not in alone:
            raise Violation("the store has a whole state, and nothing was resumed")
        if plan.end == "kill" and not told.error and any(v != NEVER for v in told.left):
            self.left[store, host] = stored(path)[1], told.left
        return told

    def _judge(self, told: Told, alone: Values, memory: Values, plan: Plan) -> None:
        known = [self.way(v) for v in (*alone, *memory) if v != NEVER]
        allowed = frozenset().union(*known) if known else frozenset()
        strangers = sorted(set(told.values) - allowed)
        if strangers:
            raise Violation(
                f"{strangers} came back, neither from the store nor from this host's memory of it"
            )
        self.counts["consistent"] += told.consistent
        self.begun |= {(told.step, told.values)} if not told.consistent else set()
        uniform = len(set(told.values)) == 1 and int(told.values[0]) % STEPS == told.step
        # If a life has resumed a mixture and closes before a step has sealed it, the mixture is the state of
        # its run.
        if told.consistent and not uniform and (told.step, told.values) not in self.begun:
            raise Violation(f"called exact at step {told.step}: {told.values}")
        if plan.mode == "rollback":
            self.counts["back"] += 1
            return
        for what, before in (("the store", alone), ("memory", memory)):
            for old, new in zip(before, told.values, strict=bool(before)):
                if old != NEVER and old not in self.way(new):
                    raise Violation(f"{what} had {old}, and {new} came back, which does not come from it")
        self.counts["from memory"] += bool(memory) and any(
            new != old for new, old in zip(told.values, alone, strict=True)
        )

    def copy(self, store: str, other: str) -> None:
        """Copy a store as `cp -a` does: into another folder, or over another store."""
        self.journal.append(f"{store} is copied to {other}")
        shutil.rmtree(self.folder / other, ignore_errors=True)
        shutil.copytree(self.folder / store, self.folder / other, symlinks=True)
        self.counts["copies"] += 1

    def prune(self, store: str) -> None:
        """Prune as the command does: with a new epoch, compaction, and the removal of old records."""
        self.journal.append(f"{store} is pruned")
        opened = Store.open(self.folder / store)
        before = stored(self.folder / store)
        prune(opened, plan_prune(opened, Retention()))
        opened.close()
        if stored(self.folder / store) != before:
            raise Violation("pruning has changed the state")
        self.counts["prunes"] += 1


def rollback_elsewhere(world: World, daemon: str = "") -> None:
    """Let a host die, roll the run back, and continue on another host. The first host returns, then a third."""
    world.run("run", "a", Plan(steps=12, durable=12, daemon=daemon))
    told = world.run("run", "a", Plan(steps=28, drained=True, daemon=daemon and "dies"))
    told = world.run("run", "b", Plan("rollback", steps=4, daemon=daemon))
    if (told.step, told.consistent) != (12, True):
        raise Violation(f"went back to {told.step}, consistent: {told.consistent}")
    world.run("run", "a", Plan(steps=0, end="close", daemon=daemon))
    world.run("run", "c", Plan(steps=2, daemon=daemon))


def copied(world: World, daemon: str = "") -> None:
    """Copy a store. Its run continues and dies, another run trains in the copy, and the first run returns."""
    world.run("run", "a", Plan(steps=12, durable=12, end="close", daemon=daemon))
    world.copy("run", "copy")
    world.run("run", "a", Plan(steps=28, durable=20, stopped=20, daemon=daemon and "dies"))
    world.run("copy", "a", Plan(steps=5, daemon=daemon and "dies"))
    world.run("run", "a", Plan(steps=2, daemon=daemon and "dies"))
    if world.counts["from memory"] != 1:
        raise Violation("the run has lost its memory to a copy of its store")
    world.run("copy", "a", Plan(steps=2, end="close", daemon=daemon))
    world.run("run", "a", Plan(steps=2, end="close", daemon=daemon))


def restored(world: World, daemon: str = "") -> None:
    """Restore a store from a backup. Later steps are in memory, and must not return."""
    world.run("run", "a", Plan(steps=12, durable=12, end="close", daemon=daemon))
    world.copy("run", "backup")
    world.run("run", "a", Plan(steps=38, durable=30, stopped=34, daemon=daemon and "dies"))
    world.copy("backup", "run")
    told = world.run("run", "a", Plan(steps=3, durable=3, daemon=daemon))
    if (told.step, told.consistent) != (12, True):
        raise Violation(f"the backup of step 12 was resumed at {told.step}, consistent: {told.consistent}")
    world.run("run", "b", Plan(steps=2, end="close", daemon=daemon))


CASES: dict[str, Callable[[World, str], None]] = {
    "rollback elsewhere": rollback_elsewhere,
    "copied": copied,
    "restored": restored,
}


def wander(world: World, rng: random.Random, acts: int, daemons: bool) -> None:
    """Do random actions in random order."""
    world.run("run", "a", Plan(steps=3, durable=1, end=rng.choice(["kill", "close"])))
    for _ in range(acts):
        stores = sorted(p.name for p in world.folder.iterdir() if (p / "scarctl.json").exists())
        chance, store = rng.random(), rng.choice(stores)
        if chance < 0.72:
            steps = rng.randint(0, 9)
            plan = Plan(
                mode=rng.choices(["partial", "rollback"], [4, 1])[0],
                steps=steps,
                durable=rng.choice([0, 0, rng.randint(0, steps)]),
                stopped=rng.choice([0, rng.randint(0, steps)]),
                end=rng.choices(["kill", "close"], [3, 1])[0],
                daemon=rng.choices(["", "stays", "dies"], [18, daemons, daemons])[0],
            )
            if plan.end == "close":
                plan = replace(plan, stopped=0)
            if plan.stopped:
                plan = replace(plan, durable=plan.durable if plan.durable < plan.stopped else 0)
            else:
                plan = replace(plan, drained=rng.random() < 0.5)
            world.run(store, rng.choice("ab"), plan)
        elif chance < 0.9:
            world.copy(store, rng.choice(sorted({"run", "copy", "backup"} - {store})))
        else:
            world.prune(store)


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """Leave out a rule inside this context."""
    before = kinship.belongs, saver.require_kinship, Address.digest
    try:
        if name == "arenas are believed whatever the store says":
            kinship.belongs = lambda lines, store: True
            saver.require_kinship = lambda arena, line, store, *, again: None
        elif name == "a copy of a store has the memory of the original":
            Address.digest = property(lambda self: "0" * 16)  # type: ignore[assignment]
        yield
    finally:
        kinship.belongs, saver.require_kinship, Address.digest = before  # type: ignore[method-assign]


MUTANTS = {
    "arenas are believed whatever the store says": ("rollback elsewhere", "restored"),
    "a copy of a store has the memory of the original": ("copied",),
}
"""Rules left out, and the cases that show the consequence."""


@contextmanager
def a_world() -> Iterator[World]:
    """Yield empty folders; remove them and their daemons afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="scarctl-hosts-"))
    try:
        yield World(folder)
    finally:
        for host in "abc":
            if (folder / host).exists():
                kill_daemon(folder / host)
        shutil.rmtree(folder)


def case(name: str, daemon: str = "") -> Counter[str]:
    """Play one of `CASES`. Raises Violation."""
    with a_world() as world:
        try:
            CASES[name](world, daemon)
        except Violation as error:
            raise Violation("\n".join([*world.journal, str(error)])) from None
        return world.counts


def episode(seed: int, acts: int = 14, *, daemons: bool = True) -> Counter[str]:
    """Play a random episode. Raises Violation."""
    with a_world() as world:
        try:
            wander(world, random.Random(seed), acts, daemons)
        except Violation as error:
            raise Violation("\n".join([*world.journal, str(error)])) from None
        return world.counts


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print. Return 1 after a violation, or if a mutant is not caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.adversarial.hosts", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", help="one of the random ones, by its number")
    parser.add_argument("--mutants", action="store_true", help="only these")
    args = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)
    failed, counts, done = 0, Counter[str](), 0
    for name in CASES if args.case is None and not args.mutants else ():
        for daemon in ("", "stays"):
            counts += case(name, daemon)
            done += 1
    if args.case is None:
        for mutant, names in MUTANTS.items():
            for name in names:
                try:
                    with mutated(mutant):
                        case(name)
                except Violation as error:
                    print(f"caught: {mutant}: {name}: {str(error).splitlines()[-1]}", flush=True)  # noqa: T201
                else:
                    failed += 1
                    print(f"NOT CAUGHT: {mutant}: {name}", flush=True)  # noqa: T201
    if args.mutants:
        return failed > 0
    end, seed = time.monotonic() + args.seconds, args.seed
    if args.case is not None:
        episode(int(args.case))
        return 0
    while time.monotonic() < end:
        try:
            counts += episode(seed)
        except Violation as error:
            failed += 1
            print(f"python -m tests.adversarial.hosts --case {seed}\n{error}", flush=True)  # noqa: T201
        seed, done = seed + 1, done + 1
    print(f"{done} cases, {failed} failures; {dict(counts)}")  # noqa: T201
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
