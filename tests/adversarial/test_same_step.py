"""Run the short form of `same_step`: no state is wrongly called exact, and every comparison of identities is needed."""

from __future__ import annotations

import pytest

from tests.adversarial.same_step import caught, explore
from tests.adversarial.same_step_mutants import MUTANTS


@pytest.mark.parametrize("case", range(12))
def test_what_is_exact_was_there(case: int) -> None:
    assert explore(case, seed=0) == ""


@pytest.mark.parametrize("case", range(16))
def test_so_was_what_was_set_aside(case: int) -> None:
    assert explore(case, seed=1, length=16, aside=True) == ""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_comparison_is_needed(mutant: str) -> None:
    # The first histories that reveal these two are the sixteenth and the thirtieth.
    first = {
        "a waiting seal takes whatever was copied since": 15,
        "hand-overs of equal names are taken for one": 29,
    }.get(mutant, 0)
    assert caught(mutant, [*range(first, 40), *range(first)], seed=0)
