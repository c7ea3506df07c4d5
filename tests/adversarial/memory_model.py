"""Explore memory with two slots and one hold: every interleaving of training, a copier, savers, and crashes.

    python -m tests.adversarial.memory_model            # all scenarios, those of two ranks too, then all mutants
    python -m tests.adversarial.memory_model --short

Two rows and extras are live. Each target has a saver, a process of its own; a saver may die, and training may be
killed and start again, at any time. A crash is a process that takes no further step, so the conditions are checked in
every state (`memory_world.check`). The rules; `MUTANTS` leaves them out:

Copying
 1. A memory checkpoint brings the slot that is not current up to date as of one *moment*, a number that counts memory
    checkpoints and not steps: a step can have two states. The next change of a row waits until the last row is
    copied; the rest goes on beside it. Extras are copied at once. Last of all one word, `current`, flips.
 2. It copies every row that changed since that slot's moment. Each slot has marks of its own. A mark is cleared when
    the row is copied, not at the flip, because training goes on before the flip.
 3. A row's version names its bytes: the moment at which they were new. It is 0 while the row is written. A row that
    is equal in both slots keeps its version, and one that is copied but has not changed since the current slot's
    moment gets the version that it has there. So two copies are equal if, and only if, their versions are. How old a
    row is says the moment of its slot.
 4. A copy with a value that is not finite, where the current slot's is, is abandoned: no flip. What it has copied
    stays marked, because only what is copied is looked at: otherwise the next copy flips with that value.
 5. A restart believes the current slot. In the other one it sets the versions of copies to 0 that are newer than the
    current slot, and marks all rows with another version than there.

The hold
 6. Slot, number, deadline and the savers that take part. Each hold has a number of its own. Who finds none, or one
    past its deadline, takes a new one for the current slot; who finds one joins it, for its slot and its deadline.
 7. `current` is read and the hold is taken in one step: one word, or under one lock. To look at `current` again
    afterwards is not enough, since another saver may have joined in between.
 8. The copier leaves the moment out if its slot is held. At the deadline it ends the hold, whoever has it and whether
    that process lives, and then writes the first byte. A flush ends any hold at any time.
 9. A saver looks for its hold, by number, after the last byte and before the record. If it is gone, it drops all that
    it has read, and begins again with the current slot.

10. What is copied in no time is copied without a hold: a *look*, which is valid if no moment has begun to write into
    the slot. A moment is counted before it changes anything there, and not if it is left out. Of a slot's own words
    its moment is written last. A saver notes the moment of the current slot. After the last byte it asks which slot is
    current. If it is the same one, it must have the same moment. Otherwise its own must be the same, and the current
    one's the newest that was counted. After some looks in vain the saver takes a hold.

Targets
11. Pending is what has another version than `durable` of the target. After its record a saver notes the versions that
    it copied. A new saver asks its target what is durable.
12. A full checkpoint takes all that is pending and the extras from the slot that is held.

A row that is lost
13. From the mark on nothing is copied and nothing flips, until the row is recovered: from the newest copy of any slot
    or target whose version is not later than asked.

The rules for ranks are in `tests.adversarial.memory_ranks`.

Not here: the order in which a processor's writes become visible to others, damaged records, and whether a saver
gets its work done before the deadline.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.adversarial import memory_look, memory_ranks
from tests.adversarial.memory_steps import OWN_WORDS, Model
from tests.adversarial.memory_world import Saver, Target, World
from tests.adversarial.search import Result, search


@dataclass(frozen=True)
class Scenario:
    """`words` of training, see `Model._change`; `savers`: the turns of each target's saver, "full" or one row.

    "*" behind a turn: with a look first.
    `kills` of training, `deaths` of savers: at most so many, at any time.
    """

    name: str
    words: str
    savers: tuple[str, ...] = ()
    kills: int = 0
    deaths: int = 0


SHORT = (
    Scenario("rows that change in turns", "a b 0", ("a full",)),
    Scenario("a restart", "a b b", ("full",), kills=1),
    Scenario("two states of one step", "a =a", ("full full",)),
    Scenario("a value that is not finite", "ab aB a", ("full",)),
    Scenario("a saver that dies", "a b 0", ("full",), deaths=1),
    Scenario("a flush during a hold", "ab ab flush", ("full",)),
    Scenario("two targets and a flush", "a flush", ("a", "a")),
    Scenario("a look", "a 0 0", ("full*",)),
    Scenario("a look and a restart", "a 0", ("full*",), kills=1),
    Scenario("a row that is lost", "a rot a mark recover", ("full",)),
    Scenario("a row that is lost after a restart", "a rot a mark recover", (), kills=1),
)
LONG = (
    Scenario("more steps, killed", "a b 0 ab", ("a full",), kills=1),
    Scenario("finite again", "ab aB a b", ("full",), kills=1),
    Scenario("two targets", "a a a", ("a", "a")),
    Scenario("full checkpoints of two targets", "ab ab", ("full", "full")),
    Scenario("a saver that dies, and two turns", "a b ab", ("full full",), deaths=1),
    Scenario("two targets, and a saver dies", "a 0 0", ("a", "a"), deaths=1),
    Scenario("two targets, two steps, and a flush", "a a flush", ("a", "a")),
    Scenario("a look at rows that change in turns", "a b a", ("a* full*",), kills=1),
    Scenario("a look beside a hold", "a a a", ("a*", "a")),
    Scenario("a look at what is not finite", "ab aB a b", ("full*",)),
    Scenario("a look and a flush", "a b flush", ("full*",), deaths=1),
    Scenario("lost, killed, and with a saver", "a rot a mark recover b", ("full",), kills=1),
    Scenario("steps without a checkpoint", "a b. a. =b", ("full",), kills=1),
)
MUTANTS = {
    "what changed since the last checkpoint is copied": "rows that change in turns",
    "the flip comes before the last row": "rows that change in turns",
    "the extras are written after the flip": "rows that change in turns",
    "a copy that is not finite is flipped": "a value that is not finite",
    "the copier ignores a hold": "two states of one step",
    "a hold does not end": "a saver that dies",
    "a saver does not look at the hold": "a saver that dies",
    "a dead saver's hold does not end": "a saver that dies",
    "two holds at once": "two targets",
    "the version is the step": "two states of one step",
    "the present version is called durable": "rows that change in turns",
    "a flush does not end the hold": "a flush during a hold",
    "a saver keeps its segment when it begins again": "a saver that dies",
    "a row that differs between the slots is taken for equal": "rows that change in turns",
    "an abandoned copy's rows count as copied": "a value that is not finite",
    "training does not wait": "a flush during a hold",
    "marks are cleared at the flip": "rows that change in turns",
    "a row that did not change gets a new version": "rows that change in turns",
    "a row that is copied gets a new version": "rows that change in turns",
    "a restart takes the slots for equal": "a restart",
    "a restart leaves copies that are too new": "a row that is lost after a restart",
    "the slot is chosen before the hold is taken": "two targets",
    "the slot is chosen before, and looked at again": "two targets",
    "a hold that is joined lasts longer": "two targets",
    "a hold is known by its slot and process": "two targets and a flush",
    "the copier writes before it ends a hold": "a saver that dies",
    "the newest copy is taken": "a row that is lost",
    "a row keeps its version while it is written": "a row that is lost",
    "copying goes on after a part was marked as lost": "a row that is lost",
    "each saver has a hold of its own, chooses before, and looks again": "two targets",
    **memory_look.MUTANTS,
}
"""Rules left out, and the scenario that shows the consequence."""
VARIANT = OWN_WORDS[0]
"""Instead of joining a hold, each saver takes one of its own. Rule 7 is needed then, too."""


def explore(scenario: Scenario, mutant: str = "") -> Result:
    """Return the number of reachable states, or the shortest way to a broken one."""
    savers = tuple(Saver(tuple(turns.split())) for turns in scenario.savers)
    world = World(
        tuple(scenario.words.split()),
        savers,
        (Target(),) * len(savers),
        ((0, 0),) * len(savers),
        kills=scenario.kills,
        deaths=scenario.deaths,
    )
    model = Model(mutant)
    if model.own_words:
        world = world._replace(holds=(None,) * len(savers))
    return search(world, model.steps)


def main(argv: Sequence[str] | None = None) -> int:
    """Explore and print. Return 1 if a scenario is broken or a mutant is not caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.adversarial.memory_model", description=__doc__)
    parser.add_argument("--short", action="store_true", help="only the small scenarios")
    args = parser.parse_args(argv)
    failed = states = 0
    started = time.monotonic()
    places = (sys.modules[__name__], memory_ranks)
    work = [(place, one, "") for place in places for one in place.SHORT + (() if args.short else place.LONG)]
    if not args.short:
        work += [
            (places[0], one, VARIANT) for one in SHORT + LONG if one.savers == ("a", "a") and not one.deaths
        ]
    for place, scenario, variant in work:
        begun = time.monotonic()
        found = place.explore(scenario, variant)
        states += found.states
        failed += bool(found.broken)
        line = f"{scenario.name:40}{found.states:>10,} states {found.steps:>11,} steps"
        line += f" {time.monotonic() - begun:>6.1f} s  {found.broken or 'holds'}  {variant}"
        print("\n    ".join([line, *found.trace]), flush=True)  # noqa: T201
    for place in places:
        by_name = {one.name: one for one in place.SHORT + place.LONG}
        for mutant, name in place.MUTANTS.items():
            found = place.explore(by_name[name], mutant)
            failed += not found.broken
            line = f"caught after {len(found.trace):2} steps" if found.broken else "NOT CAUGHT"
            print(f"{line}, {found.states:6,} states: {mutant}: {found.broken}", flush=True)  # noqa: T201
    print(f"{states:,} states, {failed} failures, {time.monotonic() - started:.0f} s")  # noqa: T201
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
