"""Run the short form of `python -m tests.adversarial.creations`."""

from __future__ import annotations

import pytest

from tests.adversarial.creations import attack


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_one_process_wins(kind: str) -> None:
    result = attack(kind, rounds=8, processes=2)
    assert not result.refused
    assert result.violations == []


def test_where_two_win_the_place_is_refused() -> None:
    result = attack("ftp", rounds=15, processes=2)
    assert result.refused
    assert result.one_winner < result.rounds, "the race shows nothing any more"
