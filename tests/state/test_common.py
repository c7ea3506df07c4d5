"""Test the comparison of digests that ranks have saved."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from scarctl.state.common import all_there, differ, name_of, read_digests


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
    ("found", "there"),
    [
        ([{}, {}], True),
        ([{name_of([0, 1]): "a"}, {name_of([0, 1]): "b"}], True),
        ([{name_of([0, 1]): "a"}, {name_of([2]): "a"}], False),
        ([{name_of([4]): "a"}], True),
        ([{"0,1": "a"}, {"0,1": "a"}], False),
    ],
)
def test_ranks_that_are_missing_are_noticed(found: list[Mapping[str, str]], there: bool) -> None:
    assert all_there(found) is there


@pytest.mark.parametrize(
    "stored", [None, "text", [1], {"a": 1}, {"a": "x" * 1001}, {str(n): "" for n in range(1001)}]
)
def test_hostile_digests_are_none(stored: object) -> None:
    assert read_digests(stored) == {}
