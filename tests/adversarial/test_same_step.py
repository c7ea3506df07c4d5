"""Run the short form of `same_step`: no state is wrongly called exact, and every comparison of identities is needed."""

from __future__ import annotations

import pytest

from tests.adversarial.same_step import caught, explore
from tests.adversarial.same_step_mutants import MUTANTS


@pytest.mark.parametrize("case", range(20))
def test_what_is_exact_was_there(case: int) -> None:
    assert explore(case, seed=0) == ""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_comparison_is_needed(mutant: str) -> None:
    assert caught(mutant, range(40), seed=0)
