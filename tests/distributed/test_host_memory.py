"""Test ranks that restart on other hosts: each finds its memory on its former host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from scarctl.distributed.host_memory import Transfer, plan_transfers
from tests.distributed.jobs import load
from tests.distributed.launch import launch

TRAIN = "tests.distributed.jobs:train"
HOMES, SWAPPED = ["east", "west"], ["west", "east"]
CUT = {"store_stops_at": 7, "flush_at": 13, "die": "all", "die_at": 13, "homes": HOMES}
"""The store has no state after step 7, and both hosts flush step 13. Then both ranks are killed."""


def cut_short(folder: Path, **options: Any) -> None:
    with pytest.raises(AssertionError, match="ended with -9"):
        launch(TRAIN, 2, "fsdp", str(folder), 20, {**CUT, **options})


def test_two_ranks_swap_hosts(tmp_path: Path) -> None:
    settings = {"settings": {"daemon": None}}
    calm = tmp_path / "calm"
    calm.mkdir()
    launch(TRAIN, 2, "fsdp", str(calm), 17, {"keep": str(calm / "end.pt")})
    cut_short(tmp_path, **settings)
    found = launch(
        TRAIN, 2, "fsdp", str(tmp_path), 17, {"homes": SWAPPED, "keep": f"{tmp_path}/end.pt", **settings}
    )
    assert [(report["step"], report["consistent"], report["errors"]) for report in found] == [
        (13, True, 0)
    ] * 2
    assert [set(report["tiers"]) for report in found] == [{"peer"}] * 2
    first, second = load(tmp_path / "end.pt"), load(calm / "end.pt")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


class TestPlan:
    def test_everybody_stays(self) -> None:
        assert plan_transfers(["a", "b"], [{0: (1, 5)}, {1: (1, 5)}], [0, 1]) == []

    def test_the_newest_by_epoch_then_step_is_brought(self) -> None:
        inventories = [{0: (1, 9), 1: (2, 3)}, {0: (2, 1)}, {1: (2, 4)}]
        assert plan_transfers(["a", "b", "c"], inventories, [0, 1, 2]) == [
            Transfer(0, 1, 0),
            Transfer(1, 2, 1),
        ]

    def test_ranks_of_one_place_share_its_list(self) -> None:
        assert plan_transfers(["a", "a"], [{0: (1, 1), 1: (1, 1)}, {}], [0, 1]) == []
        assert plan_transfers(["a", "a", "b"], [{2: (1, 1)}, {}, {}], [0, 1, 2]) == [Transfer(2, 0, 2)]

    def test_of_equal_ones_the_own_stays(self) -> None:
        assert plan_transfers(["a", "b"], [{1: (1, 1)}, {1: (1, 1)}], [0, 1]) == []

    def test_of_two_replicas_of_one_step_the_one_with_newer_copies_is_brought(self) -> None:
        assert plan_transfers(["a", "b", "c"], [{0: (1, 7, 50)}, {0: (1, 7, 60)}, {}], [1, 2, 0]) == [
            Transfer(0, 1, 2)
        ]
