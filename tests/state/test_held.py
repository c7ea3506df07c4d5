"""Test the words for what a place has of a state, and how old that is."""

from __future__ import annotations

import numpy as np
import pytest

from scarctl.state.held import MEMORY, STORE, Held, told_places
from scarctl.state.version import pack


@pytest.mark.parametrize(
    ("steps", "seconds", "words"),
    [
        ([110, 110], 0.94, "step 110, of one step, 10 iterations and 0.94 s old"),
        ([119], 600.0, "step 119, of one step, 1 iteration and 10 min old"),
        ([110], None, "step 110, of one step, 10 iterations old"),
        ([80, 96], 14.0, "copies of steps 80 to 96, up to 40 iterations old, the newest 14 s"),
        ([80, 96], None, "copies of steps 80 to 96, up to 40 iterations old"),
        ([-1, 96], 14.0, "copies of some parts, up to step 96"),
        ([-1, -1], 14.0, "nothing"),
        ([], None, "nothing"),
        ([130], 1.0, "step 130, of one step, 0 iterations and 1 s old"),
    ],
)
def test_step_and_age(steps: list[int], seconds: float | None, words: str) -> None:
    assert Held.of(np.array(steps, dtype=np.int64), seconds).told(120) == words


def test_versions_count_by_their_steps() -> None:
    held = Held.of_versions(np.array([pack(1, 9), pack(2, 7), -1]), None)
    assert (held.oldest, held.newest) == (-1, 9)


def test_all_places_in_one_line() -> None:
    places = {MEMORY: Held(110, 110, 0.9), STORE: Held(96, 96, 14.0), "elsewhere": None}
    assert told_places(places, 120, least=True) == (
        "this host's memory has step 110, of one step, at least 10 iterations and 0.9 s old; "
        "the store has step 96, of one step, at least 24 iterations and 14 s old"
    )
    assert told_places({MEMORY: None}, 0) == ""
