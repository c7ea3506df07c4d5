"""Run the short form of the model of terms: it holds, and every rule left out is noticed."""

from __future__ import annotations

import pytest

from tests.adversarial import terms_cases, terms_model


@pytest.mark.parametrize("scenario", terms_cases.SHORT, ids=[one.name for one in terms_cases.SHORT])
def test_the_model_holds(scenario: terms_cases.Scenario) -> None:
    result = terms_model.explore(scenario)
    assert (result.broken, result.trace) == ("", ())
    assert result.states > 50


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(
            one, marks=[pytest.mark.long, pytest.mark.timeout(600)] if one in terms_cases.SLOW else []
        )
        for one in terms_cases.MUTANTS
    ],
)
def test_every_rule_is_needed(mutant: str) -> None:
    result = terms_model.explore(terms_cases.MUTANTS[mutant], mutant)
    assert result.broken
    assert result.trace
