"""Check the protocol's model exhaustively: every interleaving of a few writers, readers and others.

    python -m tests.adversarial.model            # all scenarios, then all mutants
    python -m tests.adversarial.model --short

A mutant is the protocol with one of its rules left out; each has to be caught, or the checking proves nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from tests.adversarial import arenas, replicas
from tests.adversarial.protocol import ENDED, MUTANTS, Model, Process
from tests.adversarial.protocol_files import Files, check
from tests.adversarial.search import Result, search

World = tuple[Files, tuple[Process, ...]]


@dataclass(frozen=True)
class Scenario:
    """`past`: the actions of one writer before. `cast`: those of the others, whose steps interleave in any order."""

    name: str
    past: str
    cast: tuple[str, ...]
    lossy: int = 0
    stale: int = 0


SHORT = (
    Scenario("a zombie, its successor collects", "", ("open seal commit", "open seal commit collect")),
    Scenario("two openings, one collects", "open seal", ("open commit", "open commit collect")),
    Scenario(
        "a collector and its successor", "open seal seal", ("open commit collect commit", "open commit")
    ),
    Scenario("an opening of an empty log", "", ("open commit", "open commit commit collect")),
    Scenario("lost answers", "open seal", ("open commit", "open commit collect"), lossy=1),
    Scenario("back while the other collects", "open seal seal", ("open collect", "open back commit")),
    Scenario(
        "a snapshot while it collects", "open seal", ("open seal commit collect", "snap", "snap unname")
    ),
    Scenario("prune beside an upload", "open seal", ("open commit commit", "prune", "open commit")),
    Scenario("a reader beside a collector", "open seal", ("open commit compact collect", "read")),
    Scenario("stale listings", "open seal commit", ("open commit collect", "open commit"), stale=2),
    Scenario("stale listings of an empty log", "", ("open commit", "open commit commit collect"), stale=1),
    Scenario("late requests for the ground", "", ("open commit", "open commit collect"), lossy=1),
)
LONG = (
    Scenario("three writers", "open seal", ("open commit collect", "open seal collect", "open commit")),
    Scenario(
        "lost answers, more commits", "open seal", ("open commit commit", "open commit collect"), lossy=1
    ),
    Scenario(
        "lost answers, both collect",
        "open seal",
        ("open commit collect", "open seal commit collect"),
        lossy=1,
    ),
    Scenario(
        "back, both collect", "open seal seal", ("open seal collect back commit", "open back seal collect")
    ),
    Scenario(
        "snapshots while two collect",
        "open seal seal",
        ("open collect", "open commit collect", "snap unname"),
    ),
    Scenario(
        "a reader while two collect", "open seal", ("open collect", "open seal compact collect", "read")
    ),
    Scenario(
        "stale listings, both collect",
        "open seal commit",
        ("open commit collect", "open seal collect commit"),
        stale=3,
    ),
    Scenario("prune beside two", "open seal", ("open commit collect", "prune", "open seal commit")),
    Scenario(
        "a third one takes the ground's number",
        "open",
        ("open collect commit", "open", "open commit collect"),
    ),
    Scenario("late requests for a boundary", "open", ("open collect commit", "open commit collect"), lossy=1),
)


def explore(scenario: Scenario, mutant: str = "") -> Result:
    """Return the number of reachable states, or the shortest way to a broken one."""
    model = Model(mutant, scenario.stale)
    return search(_begin(scenario), lambda world: _following(model, world))


def _following(model: Model, world: World) -> list[tuple[str, World]]:
    files, cast = world
    check(files)
    found: list[tuple[str, World]] = []
    for i, process in enumerate(cast):
        if process.at not in ENDED:
            for what, after, changed in model.steps(files, process):
                found.append((what, (after, (*cast[:i], changed, *cast[i + 1 :]))))
    found += [(what, (after, cast)) for what, after in model.arrivals(files)]
    return found


def _begin(scenario: Scenario) -> World:
    """Return the store after its past, with all processes about to begin."""
    files, model = Files(), Model()
    past = _process("past", scenario.past, 0)
    while past.at not in ENDED:
        _, files, past = next(iter(model.steps(files, past)))
    return files, tuple(_process("ABCD"[i], words, scenario.lossy) for i, words in enumerate(scenario.cast))


def _process(name: str, words: str, lossy: int) -> Process:
    first, *todo = words.split() or ["over"]
    return Process(name, first, tuple(todo), lossy=lossy)


def _explore_all(place: ModuleType, *, short: bool, only: str | None) -> tuple[int, int]:
    """Explore the scenarios of a model of memory, then its mutants. Return the numbers of states and of failures."""
    states = failed = 0
    for scenario in place.SHORT if short else place.SHORT + place.LONG:
        if only and only not in scenario.name:
            continue
        found = place.explore(scenario)
        states += found.states
        failed += bool(found.broken)
        line = f"{scenario.name:35}{found.states:>10,} states {found.steps:>11,} steps"
        print("\n    ".join([f"{line}  {found.broken or 'holds'}", *found.trace * bool(found.broken)]))  # noqa: T201
    for mutant in () if only else place.MUTANTS:
        wanted = place.MUTANTS[mutant]
        found = place.explore(next(one for one in place.SHORT if one.name == wanted), mutant)
        failed += not found.broken
        line = f"caught after {len(found.trace):2} steps" if found.broken else "NOT CAUGHT"
        print(f"{line}: {mutant}: {found.broken}", flush=True)  # noqa: T201
    return states, failed


def main(argv: Sequence[str] | None = None) -> int:
    """Explore and print. Return 1 if the protocol is broken or a mutant is not caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.adversarial.model", description=__doc__)
    parser.add_argument("--short", action="store_true", help="only the small casts")
    parser.add_argument(
        "--trace", action="store_true", help="print the way to what is broken in mutants, too"
    )
    parser.add_argument("--only", help="of the scenarios those whose names hold this; no mutants")
    args = parser.parse_args(argv)
    failed = states = 0
    started = time.monotonic()
    for scenario in SHORT if args.short else SHORT + LONG:
        if args.only and args.only not in scenario.name:
            continue
        begun = time.monotonic()
        result = explore(scenario)
        states += result.states
        outcome = result.broken or "holds"
        line = f"{scenario.name:35}{result.states:>10,} states {result.steps:>11,} steps"
        print(f"{line} {time.monotonic() - begun:>6.1f} s  {outcome}", flush=True)  # noqa: T201
        if result.broken:
            failed += 1
            print("\n".join(f"    {step}" for step in result.trace))  # noqa: T201
    for place in (arenas, replicas):
        found = _explore_all(place, short=args.short, only=args.only)
        states, failed = states + found[0], failed + found[1]
    by_name = {scenario.name: scenario for scenario in SHORT}
    for mutant in () if args.only else MUTANTS:
        result = explore(by_name[MUTANTS[mutant]], mutant)
        if not result.broken:
            failed += 1
            print(f"NOT CAUGHT: {mutant}", flush=True)  # noqa: T201
            continue
        print(f"caught after {len(result.trace):2} steps: {mutant}: {result.broken}", flush=True)  # noqa: T201
        if args.trace:
            print("\n".join(f"    {step}" for step in result.trace))  # noqa: T201
    print(f"{states:,} states, {failed} failures, {time.monotonic() - started:.0f} s")  # noqa: T201
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
