"""Run the models' short form: a few processes hold, and every rule left out is noticed."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from tests.adversarial import acknowledged, leaving, replicas

PLACES = {"replicas": replicas, "acknowledgements": acknowledged, "leaving": leaving}


@pytest.mark.parametrize(
    ("place", "scenario"),
    [
        pytest.param(place, one, id=f"{what}: {one.name}")
        for what, place in PLACES.items()
        for one in place.SHORT
    ],
)
def test_a_model_holds(place: ModuleType, scenario: Any) -> None:
    result = place.explore(scenario)
    assert (result.broken, result.trace) == ("", ())
    assert result.states > 500


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", acknowledged.LONG, ids=[one.name for one in acknowledged.LONG])
def test_what_peers_acknowledge_survives_in_longer_runs(scenario: acknowledged.Scenario) -> None:
    result = acknowledged.explore(scenario)
    assert (result.broken, result.trace) == ("", ())


@pytest.mark.parametrize(
    ("place", "mutant"),
    [
        pytest.param(place, one, id=f"{what}: {one}")
        for what, place in PLACES.items()
        for one in place.MUTANTS
    ],
)
def test_every_rule_is_needed(place: ModuleType, mutant: str) -> None:
    known = {one.name: one for one in (*place.SHORT, *getattr(place, "LONG", ()))}
    result = place.explore(known[place.MUTANTS[mutant]], mutant)
    assert result.broken
    assert 5 < len(result.trace) < 40


def test_each_of_the_six_rules_has_a_mutant() -> None:
    assert {name[0] for name in replicas.MUTANTS if name[0].isdigit()} == set("123456")


def test_the_window_of_one_acknowledgement_is_two_hosts_at_once() -> None:
    """ "next" does not promise more, as docs/peers.md says."""
    result = acknowledged.explore(acknowledged.WINDOW)
    assert result.broken
    assert [what for what in result.trace if what.endswith("is lost")] == [
        "the owner is lost",
        "host 0 is lost",
    ]
