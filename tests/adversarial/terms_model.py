"""Explore a store with terms: every interleaving of a few writers, collectors, readers, snapshots, and users.

    python -m tests.adversarial.terms_model            # all scenarios, then all mutants
    python -m tests.adversarial.terms_model --short

A writer *claims* a term, and puts its records under names of its own. A crash is a process that takes no further step,
and a request whose answer is lost arrives at any later time, or never. So the conditions are checked in every state:
`Rules.check` for files, `Rules.judge` for memory. The rules; `MUTANTS` leaves them out:

Terms
 1. `terms/<number>` is created exclusively, with a random id as content. After a lost answer it is read: own bytes are
    its own claim; if it is absent, the same bytes are sent again; other bytes: list again. It is never deleted.
 2. After the claim the writer goes down through the terms that are listed below its own. Of each that is open it lists
    the records, and *closes* its log after record s: the highest number up to which all records from 1 on are there.
    The closing is a record s + 1, created exclusively. If that exists, it lists again. A term without
    records is closed, too. The first term with s > 0 has the base. If a file is missing, it begins again with 1.
    What is at or above a closing does not count. A closing is never deleted. A number below its own that it does not
    see claimed it claims as well: the creation decides, where a list may be stale.
 3. Names of records have the term's number and id, segments random names. Records are created exclusively, one after
    the other. A number in doubt is sent again with the same bytes. If other bytes are there, the writer is fenced.
 4. The *look*, after the record and before it is acknowledged: its own claim is there, with its own bytes, no term is
    higher, this record with its segments is there, and the one before, or the base of a first one. Otherwise it is
    fenced. Then memory notes the record, and only then the caller is told.
 5. The first record of a term is full: it has the whole table, the newest consistent state, and the line. So has the
    record of a consistent state.
 6. A record counts once it is visible below its log's closing. A reader lists terms, and takes the newest one with
    such a record. If a file is missing, or a closed log has not all that its closing says, it begins again; if it is
    again, the store is damaged, or the log counts as far as it goes.

Collection
 7. Only the logs of older terms are collected: they are closed, so none of their numbers is ever used again. To collect
    what its own records have replaced, a writer opens the store again. After its first record, which is full: list
    snapshots, records and segments; look; delete segments of its own and older terms that it does not need, and records
    of older terms that are not kept. What its own records and the newest consistent state need it knows itself; of
    snapshots it reads the record, and ignores one without.
 8. A snapshot's file is created, then the newest full record is read: the snapshot counts if its record is not older,
    or if it is the newest consistent state there. Otherwise it is deleted.

Memory
 9. Each record has the *line*: the id and number of the newest record that has changed the state. Memory notes two of
    them for each target: `own`, of its own term, 0 before its first one; and `base`, that of the store when it opened
    it, until then. It belongs to the store if the line is `base`, or has the id of `own` and no lower number. To a
    store without a record it belongs if both have none, and its term is claimed there.
10. An opening notes both in the flip that takes over the content. If memory does not belong to the store, it gets the
    store's state, and forgets the other targets. A roll-back notes nothing before its record is acknowledged; then it
    takes over the content, its own line, and forgets the other targets, in one flip. A saver whose training process
    was killed notes a record only if memory still has the id of its term.
11. What is durable is asked of each target. Versions are compared only if memory belongs to it; otherwise nothing is.

A backup that is put back cannot be told from a store that never went on. So memory is believed if what its caller was
told is in the backup, and the backup is a beginning of memory: also if another host had gone on meanwhile. Otherwise it
is set aside. Processes that live while a backup is put back, or a store is removed, acknowledge nothing of which a part
is missing. Requests that are on their way are assumed to arrive before a backup is put back. What is put without being
acknowledged may name segments that are not in the backup: these copies are damaged.

Where records are exclusive, the look does not have to see newer terms (`VARIANT`): the closing fences a writer a little
later, and stale listings lose nothing.

`plain` stores put records without a condition. There a file `ended` says how far a log counts. They need more: the
look decides alone, so a listing that hides a newer term loses an acknowledged record. A clone of a process writes over
its records. An opening of a store that was removed may close a log of the new one. And what a reader sees is not
settled until it has looked, too, or the log is closed.

Not here: several lanes of one state, moved copies, damaged records, power loss, lists and looks of several requests,
stale listings together with late requests, a collector beside its own writer.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tests.adversarial.search import Result, search
from tests.adversarial.terms_cases import LONG, MUTANTS, SHORT, Scenario
from tests.adversarial.terms_others import Others
from tests.adversarial.terms_world import Memory, Process, Store, World, onward, over
from tests.adversarial.terms_writer import trained

GOES_ON = ("put", "look", "note", "again", "delete")
"""What a saver ends although its training process was killed."""
USER = ("backup", "restore", "remove", "copy")
VARIANT = "the look does not see newer terms"
"""A mutant of plain stores. Without it, too, all scenarios hold where records are created exclusively."""


class Model(Others):
    def steps(self, world: World) -> Iterator[tuple[str, World]]:
        for store in world.stores:
            if store not in self._fine:
                self.check(store)
        for path, store in enumerate(world.stores):
            for request in store.flying:
                arrived = self.arrive(store._replace(flying=store.flying - {request}), request)
                yield f"a late {request[0]} arrives", world._replace(stores=_put(world.stores, path, arrived))
        for host, memory in enumerate(world.memories):
            if memory.beside and memory.ready:
                after = trained(memory, host, memory.life)._replace(beside=memory.beside - 1)
                yield f"host {host} trains", world._replace(memories=_put(world.memories, host, after))
        for i, p in enumerate(world.processes):
            for what, after in self._process(world, i, p):
                yield f"{p.name}: {what}", after

    def _process(self, world: World, i: int, p: Process) -> Iterator[tuple[str, World]]:
        if p.at == "over":
            return
        if p.at == "wait":
            yield from self._start(world, i, p)
        elif p.at == "clone":
            of = world.processes[p.of]
            if of.at == "commit" and of.tail is not None:
                clone = of._replace(name=p.name, host=p.host, at=p.todo[0], todo=p.todo[1:])
                memory = world.memories[of.host]
                memories = _put(world.memories, p.host, memory)
                yield "is a clone", _with(world._replace(memories=memories), i, clone)
        elif p.at in USER:
            yield from self.user(world, i, p)
        else:
            stores, memories, processes, backup = world
            here, mine = stores[p.path], memories[p.host]
            for what, store, memory, after in getattr(self, f"_{p.at}")(here, mine, p):
                files = stores if store is here else _put(stores, p.path, store)
                noted = memories if memory is mine else _put(memories, p.host, memory)
                yield what, World(files, noted, _put(processes, i, after), backup)

    def _start(self, world: World, i: int, p: Process) -> Iterator[tuple[str, World]]:
        """Begin a life on this host. The one before was killed, if it is not over."""
        memory = world.memories[p.host]
        if memory.life == p.life - 1:
            for j, q in enumerate(world.processes):
                if q.host == p.host and q.life < p.life:
                    ends = q._replace(zombie=True, todo=()) if q.at in GOES_ON else over(q)
                    world = _with(world, j, ends)
            memory = memory._replace(life=p.life, ready=False)
            world = world._replace(memories=_put(world.memories, p.host, memory))
        if memory.life == p.life:
            yield f"starts life {p.life}", _with(world, i, onward(p))


def _put(items: tuple[Any, ...], i: int, item: object) -> Any:
    return (*items[:i], item, *items[i + 1 :])


def _with(world: World, i: int, p: Process) -> World:
    return world._replace(processes=_put(world.processes, i, p))


def begin(scenario: Scenario) -> World:
    """Return the first state. An actor is "[host] [path] [late ...] [stale ...] [clone]: words"."""
    processes: list[Process] = []
    heads = [actor.partition(":")[0].split() for actor in scenario.cast]
    hosts = [
        next((one for one in head if len(one) == 1 and one.isalpha()), f"-{i}")
        for i, head in enumerate(heads)
    ]
    order = list(dict.fromkeys(hosts))
    for i, actor in enumerate(scenario.cast):
        head, words = heads[i], tuple(actor.partition(":")[2].split())
        path = int("1" in head)
        same = [j for j, host in enumerate(hosts) if host == hosts[i]]
        before = [j for j in same if j < i and ("1" in heads[j]) == bool(path)]
        life = len(before) + 1 if len(same) > 1 else 0
        at = "wait" if life else "clone" if "clone" in head else ""
        p = Process(
            "pqrstuv"[i], at or words[0], words if at else words[1:], order.index(hosts[i]), path, life
        )
        p = p._replace(lossy=head.count("late"), stale=head.count("stale"), of=i - 1)
        processes.append(p._replace(second=path == 1 and len(same) > 1))
    beside = [scenario.beside if host == hosts[0] else 0 for host in order]
    return World((Store(), Store()), tuple(Memory(beside=number) for number in beside), tuple(processes))


def explore(scenario: Scenario, mutant: str = "") -> Result:
    """Return the number of reachable states, or the shortest way to a broken one."""
    return search(begin(scenario), Model(mutant, scenario.plain, scenario.gap).steps)


def main(argv: Sequence[str] | None = None) -> int:
    """Explore and print. Return 1 if a scenario is broken or a mutant is not caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.adversarial.terms_model", description=__doc__)
    parser.add_argument("--short", action="store_true", help="only the small scenarios")
    parser.add_argument("--only", default="", metavar="WORD", help="scenarios and mutants with this word")
    args = parser.parse_args(argv)
    failed = states = 0
    started = time.monotonic()
    scenarios = SHORT + (() if args.short else LONG)
    work = [(one, "") for one in scenarios]
    work += [(one, VARIANT) for one in scenarios if not one.plain and not args.short]
    for scenario, variant in work:
        if args.only not in scenario.name:
            continue
        begun = time.monotonic()
        found = explore(scenario, variant)
        states += found.states
        failed += bool(found.broken)
        line = f"{scenario.name:50}{found.states:>10,} states {found.steps:>11,} steps"
        line += f" {time.monotonic() - begun:>6.1f} s  {found.broken or 'holds'}  {variant}"
        print("\n    ".join([line, *found.trace]), flush=True)  # noqa: T201
    for mutant, scenario in MUTANTS.items():
        if args.only not in mutant:
            continue
        found = explore(scenario, mutant)
        failed += not found.broken
        line = f"caught after {len(found.trace):2} steps" if found.broken else "NOT CAUGHT"
        print(f"{line}, {found.states:6,} states: {mutant}: {found.broken}", flush=True)  # noqa: T201
    print(f"{states:,} states, {failed} failures, {time.monotonic() - started:.0f} s")  # noqa: T201
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
