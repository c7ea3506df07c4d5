"""Test how often ranks exchange values while they attach and resume: each exchange waits for the slowest rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import scarctl
import scarctl.api
from scarctl.config import grouped
from scarctl.distributed.collectives import Team
from tests.distributed.jobs import Bowl
from tests.distributed.launch import launch

pytestmark = pytest.mark.long

T = TypeVar("T")
MOST = {"attach": 7, "resume": 14}
"""Exchanges of a start that continues an earlier one. They were 12 and 16 at first."""


class Counting(Team):
    """Counts the exchanges of all teams of this process."""

    exchanges = 0

    def collectively(self, call: Callable[[], T]) -> T:
        Counting.exchanges += 1
        return super().collectively(call)


def starts(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Train one step, start again, and return the exchanges of the second start."""
    scarctl.api.Team = Counting  # type: ignore[misc]
    Path(folder, "arena").mkdir(exist_ok=True)
    found: dict[str, Any] = {}
    for _ in range(2):
        torch.manual_seed(0)
        model = Bowl()
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        options = grouped(interval=1000, daemon=False, arena_dir=f"{folder}/arena")
        Counting.exchanges = 0
        session = scarctl.attach(model, optimizer, store=f"{folder}/store", **options)
        found["attach"], Counting.exchanges = Counting.exchanges, 0
        found["step"] = session.resume().step
        found["resume"] = Counting.exchanges
        model().backward()
        optimizer.step()
        session.close()
    return found


def test_a_start_exchanges_little(tmp_path: Path) -> None:
    for found in launch("tests.distributed.test_exchanges:starts", 2, str(tmp_path)):
        assert found.pop("step") == 1
        assert {name: count for name, count in found.items() if count > MOST[name]} == {}
