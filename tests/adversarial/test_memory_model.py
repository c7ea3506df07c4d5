"""Run the short form of the model of two slots and one hold: it holds, and every rule left out is noticed."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from tests.adversarial import memory_model, memory_ranks

PLACES = {"memory": memory_model, "ranks": memory_ranks}


@pytest.mark.parametrize(
    ("place", "scenario"),
    [
        pytest.param(place, one, id=f"{what}: {one.name}")
        for what, place in PLACES.items()
        for one in place.SHORT
    ],
)
def test_the_model_holds(place: ModuleType, scenario: Any) -> None:
    result = place.explore(scenario)
    assert (result.broken, result.trace) == ("", ())
    assert result.states > 300


@pytest.mark.parametrize(
    ("place", "mutant"),
    [
        pytest.param(place, one, id=f"{what}: {one}")
        for what, place in PLACES.items()
        for one in place.MUTANTS
    ],
)
def test_every_rule_is_needed(place: ModuleType, mutant: str) -> None:
    known = {one.name: one for one in place.SHORT + place.LONG}
    result = place.explore(known[place.MUTANTS[mutant]], mutant)
    assert result.broken
    assert result.trace
    assert result.states < 20_000


@pytest.mark.long
def test_each_saver_may_have_a_hold_of_its_own_instead() -> None:
    """Then none of them joins another's; memory becomes no older by that."""
    known = {one.name: one for one in (*memory_model.SHORT, *memory_model.LONG)}
    result = memory_model.explore(known["two targets"], memory_model.VARIANT)
    assert (result.broken, result.trace) == ("", ())
