"""The model's short form: small casts hold, and every rule that is left out shows."""

from __future__ import annotations

import pytest

from tests.adversarial import arenas, replicas
from tests.adversarial.model import SHORT, Scenario, explore
from tests.adversarial.protocol import MUTANTS

BY_NAME = {scenario.name: scenario for scenario in SHORT}


@pytest.mark.parametrize("scenario", SHORT, ids=BY_NAME)
def test_the_protocol_holds(scenario: Scenario) -> None:
    result = explore(scenario)
    assert (result.broken, result.trace) == ("", ())
    assert result.states > 500


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_rule_is_needed(mutant: str) -> None:
    result = explore(BY_NAME[MUTANTS[mutant]], mutant)
    assert result.broken
    assert 5 < len(result.trace) < 30


@pytest.mark.parametrize("scenario", arenas.SHORT, ids=[scenario.name for scenario in arenas.SHORT])
def test_memory_belongs_to_its_store(scenario: arenas.Scenario) -> None:
    result = arenas.explore(scenario)
    assert (result.broken, result.trace) == ("", ())
    assert result.states > 500


@pytest.mark.parametrize("mutant", arenas.MUTANTS)
def test_every_rule_about_memory_is_needed(mutant: str) -> None:
    (scenario,) = (one for one in arenas.SHORT if one.name == arenas.MUTANTS[mutant])
    result = arenas.explore(scenario, mutant)
    assert result.broken
    assert 5 < len(result.trace) < 30


@pytest.mark.parametrize("scenario", replicas.SHORT, ids=[scenario.name for scenario in replicas.SHORT])
def test_replicas_are_whole_and_of_the_newest_owner(scenario: replicas.Scenario) -> None:
    result = replicas.explore(scenario)
    assert (result.broken, result.trace) == ("", ())
    assert result.states > 500


@pytest.mark.parametrize("mutant", replicas.MUTANTS)
def test_every_rule_of_replicas_is_needed(mutant: str) -> None:
    (scenario,) = (one for one in replicas.SHORT if one.name == replicas.MUTANTS[mutant])
    result = replicas.explore(scenario, mutant)
    assert result.broken
    assert 5 < len(result.trace) < 30


def test_each_of_the_six_rules_has_a_mutant() -> None:
    assert {name[0] for name in replicas.MUTANTS if name[0].isdigit()} == set("123456")
