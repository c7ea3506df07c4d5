"""Test extras of a checkpoint: stored values are returned, and values that no session can have stored are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scarctl.errors import Corruption
from scarctl.state import codec
from scarctl.state.caveats import Caveat
from scarctl.state.extras import Extras, Notes, PolicyMemory
from scarctl.state.journal import Event

POINTS = np.array([[0.0, 1.0, 2.5], [1.0, 1.0, 2.0]])


def full() -> Extras:
    return Extras(
        state={"rng": None, "extras": {"position": {"done": 3}}},
        loop={"epoch": 1, "begun": None, "passes": [], "left": []},
        policy=PolicyMemory(17, 4),
        notes=Notes(
            POINTS,
            "l2",
            (Caveat("k", "m"),),
            (Event("started", "2026-01-01T00:00:00+00:00", 0, {"process": "host:1"}),),
            np.zeros((1, 5)),
            declared=True,
        ),
    )


def test_a_tree_has_the_fields_of_the_format_in_their_order() -> None:
    tree = full().to_tree()
    notes = ["history", "caveats", "events", "samples", "declared"]
    assert list(tree) == ["state", "loop", "policy", *notes]
    assert tree["policy"] == {"credit": 17, "cursor": 4}
    assert tree["history"]["norm"] == "l2"
    assert tree["caveats"] == [{"kind": "k", "message": "m"}]
    assert list(Extras(state=1).to_tree()) == ["state", "policy"]


def test_what_was_stored_comes_back() -> None:
    found = Extras.from_tree(codec.decode(*codec.encode(full().to_tree())))
    assert found.state == full().state
    assert (found.loop, found.policy, found.notes.caveats) == (
        full().loop,
        full().policy,
        full().notes.caveats,
    )
    assert np.array_equal(found.notes.points, POINTS)
    assert found.to_tree().keys() == full().to_tree().keys()


@pytest.mark.parametrize("tree", [None, 5, [], {}, {"loop": None}, {"retired": True}, {"step": 3}])
def test_what_no_session_stored_is_refused(tree: object) -> None:
    with pytest.raises(Corruption, match="extras"):
        Extras.from_tree(tree)


def test_a_position_that_is_none_is_refused() -> None:
    with pytest.raises(Corruption, match="position of the loop"):
        Extras.from_tree({"state": 1, "loop": [1]})


def test_older_extras_have_defaults_for_what_they_lack() -> None:
    assert Extras.from_tree({"state": 1}) == Extras(1)


@pytest.mark.parametrize(
    "memory", [None, {"credit": -1}, {"credit": True}, {"cursor": 1.5}, {"seed": 1 << 64}]
)
def test_a_policy_that_cannot_be_has_forgotten(memory: object) -> None:
    assert PolicyMemory.from_tree(memory) == PolicyMemory()


def test_a_policy_remembers_its_seed_only_without_a_session() -> None:
    assert PolicyMemory(1, 2, 0).to_tree() == {"credit": 1, "cursor": 2, "seed": 0}
    assert PolicyMemory.from_tree({"credit": 1, "cursor": 2, "seed": 0}) == PolicyMemory(1, 2, 0)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just(np.zeros(2)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(["state", "loop", "policy", "history", "caveats", "at", "max_lag", "unknown"])


@given(st.dictionaries(FIELDS, VALUES) | VALUES)
def test_hostile_trees_are_read_or_refused(tree: Any) -> None:
    assert isinstance(Notes.from_tree(tree), Notes)
    try:
        found = Extras.from_tree(tree)
    except Corruption:
        return
    codec.encode(found.to_tree())


def test_notes_of_another_process_keep_what_is_of_the_run() -> None:
    mixed = full().notes.of_part(Notes())
    assert mixed == Notes(caveats=full().notes.caveats, events=full().notes.events, declared=True)
    assert mixed.to_tree().keys() == {"caveats", "events", "declared"}


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "now", 3, True, None, [1.0]])
def test_a_time_that_no_session_stored_is_unknown(value: object) -> None:
    assert Notes.from_tree({"at": value, "max_lag": value}) == Notes()
    notes = Notes(at=1.75e9, max_lag=30.0)
    assert Notes.from_tree(notes.to_tree()) == notes
