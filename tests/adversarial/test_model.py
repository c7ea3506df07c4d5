"""Run the model's short form: a few processes hold, and every rule left out is noticed."""

from __future__ import annotations

import pytest

from tests.adversarial import acknowledged, arenas, replicas
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


@pytest.mark.parametrize("scenario", acknowledged.SHORT, ids=[one.name for one in acknowledged.SHORT])
def test_what_peers_acknowledge_survives(scenario: acknowledged.Scenario) -> None:
    result = acknowledged.explore(scenario)
    assert (result.broken, result.trace) == ("", ())
    assert result.states > 500


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", acknowledged.LONG, ids=[one.name for one in acknowledged.LONG])
def test_what_peers_acknowledge_survives_in_longer_runs(scenario: acknowledged.Scenario) -> None:
    result = acknowledged.explore(scenario)
    assert (result.broken, result.trace) == ("", ())


@pytest.mark.parametrize("mutant", acknowledged.MUTANTS)
def test_every_rule_of_acknowledging_is_needed(mutant: str) -> None:
    known = {one.name: one for one in (*acknowledged.SHORT, *acknowledged.LONG)}
    result = acknowledged.explore(known[acknowledged.MUTANTS[mutant]], mutant)
    assert result.broken
    assert 5 < len(result.trace) < 30


def test_the_window_of_one_acknowledgement_is_two_hosts_at_once() -> None:
    """ "next" does not promise more, as docs/peers.md says."""
    result = acknowledged.explore(acknowledged.WINDOW)
    assert result.broken
    assert [what for what in result.trace if what.endswith("is lost")] == [
        "the owner is lost",
        "host 0 is lost",
    ]
