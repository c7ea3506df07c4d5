"""Check the models of replicas exhaustively: every interleaving of owners, links, peers and those who come after.

    python -m tests.adversarial.model            # all scenarios, then all mutants
    python -m tests.adversarial.model --short

A mutant is the protocol with one of its rules left out; each has to be caught, or the checking proves nothing. The
store's own protocol, with memory that belongs to it, is checked by `tests.adversarial.terms_model`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from types import ModuleType

from tests.adversarial import replicas


def _explore_all(place: ModuleType, *, short: bool, only: str | None) -> tuple[int, int]:
    """Explore the scenarios of a model, then its mutants. Return the numbers of states and of failures."""
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
    parser.add_argument("--only", help="of the scenarios those whose names hold this; no mutants")
    args = parser.parse_args(argv)
    started = time.monotonic()
    states, failed = _explore_all(replicas, short=args.short, only=args.only)
    print(f"{states:,} states, {failed} failures, {time.monotonic() - started:.0f} s")  # noqa: T201
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
