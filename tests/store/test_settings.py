"""Test a store's settings: within their limits, and checked alike from a file and from a user."""

from __future__ import annotations

from typing import Any

import pytest

from scarctl.errors import Corruption, UsageError
from scarctl.store.format import MAX_SHARD
from scarctl.store.settings import Settings

GOOD: dict[str, Any] = {
    "shards": 3,
    "seed": 7,
    "partition_bytes": 4096,
    "by_layer": True,
    "rows": [["emb*", 2]],
}


def test_what_is_written_is_read() -> None:
    assert Settings.from_json(GOOD, "scarctl.json") == Settings(
        shards=3, seed=7, partition_bytes=4096, by_layer=True, rows=(("emb*", 2),)
    )
    assert Settings.from_json({**GOOD, "partition_bytes": None}, "scarctl.json").partition_bytes is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"shards": 0},
        {"shards": MAX_SHARD + 2},
        {"shards": 1.0},
        {"shards": True},
        {"seed": -1},
        {"seed": 1 << 62},
        {"partition_bytes": 0},
        {"partition_bytes": "4096"},
        {"by_layer": 1},
        {"rows": {"emb": 2}},
        {"rows": [["emb", 0]]},
        {"rows": [["emb", 2.0]]},
        {"rows": [["emb", True]]},
        {"rows": [[5, 2]]},
        {"rows": [["emb", 2, 3]]},
    ],
    ids=str,
)
def test_a_file_with_another_value_is_damaged(wrong: dict[str, Any]) -> None:
    with pytest.raises(Corruption, match=r"scarctl\.json|settings|shards|seed"):
        Settings.from_json({**GOOD, **wrong}, "scarctl.json")


@pytest.mark.parametrize("missing", sorted(GOOD.keys() - {"partition_bytes"}))
def test_a_file_without_a_field_is_damaged(missing: str) -> None:
    with pytest.raises(Corruption):
        Settings.from_json({k: v for k, v in GOOD.items() if k != missing}, "scarctl.json")


def test_a_user_is_told_the_limits() -> None:
    for wrong in ({"shards": 0}, {"seed": -1}, {"partition_bytes": 0}, {"rows": (("w", 0),)}):
        with pytest.raises(UsageError, match=f"{next(iter(wrong)).split('_')[0]}"):
            Settings(**wrong)  # type: ignore[arg-type]
    assert Settings(shards=MAX_SHARD + 1).shards == MAX_SHARD + 1
