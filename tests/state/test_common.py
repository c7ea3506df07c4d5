"""Test the comparison of digests that ranks have saved."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from scarctl.state.common import differ, read_digests


@pytest.mark.parametrize(
    ("ranks", "different"),
    [
        ([{}, {}], False),
        ([{"a": "1"}, {}], False),
        ([{"a": "1"}, {"b": "2"}], False),
        ([{"a": "1", "b": "1"}, {"a": "1"}, {"b": "2"}], True),
    ],
)
def test_only_digests_of_the_same_ranks_are_compared(ranks: list[Mapping[str, str]], different: bool) -> None:
    assert differ(ranks) is different


@pytest.mark.parametrize(
    "stored", [None, "text", [1], {"a": 1}, {"a": "x" * 1001}, {str(n): "" for n in range(1001)}]
)
def test_hostile_digests_are_none(stored: object) -> None:
    assert read_digests(stored) == {}
