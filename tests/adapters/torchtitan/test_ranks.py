"""Two ranks train under torchtitan's Trainer: stopped, resumed, on as many ranks and on another number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.adapters.rank_checks import check_halves
from tests.distributed.launch import launch

pytest.importorskip("torchtitan", reason="torchtitan is not installed here: `make frameworks`")

JOBS = "tests.adapters.torchtitan.jobs"
KINDS: list[dict[str, Any]] = [
    {},  # FSDP2
    {"accumulation": 2},
    {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1},
    {"tensor_parallel_degree": 2},
]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_resumed_run_is_the_undisturbed_one(tmp_path: Path) -> None:
    """Bit for bit: parameters, slots, counts, schedules, and the losses of the rest, so the data too."""
    for whole, resumed in check_halves(JOBS, tmp_path, KINDS, timeout=250):
        assert resumed["losses"] == {n: loss for n, loss in whole["losses"].items() if int(n) > 4}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_another_number_of_ranks_takes_over(tmp_path: Path) -> None:
    """The same values, divided otherwise. The data begins again, on all ranks: so the resume is not exact."""
    before: dict[str, str] = {}
    for world, until, kind in ((2, 3, {}), (1, 5, {}), (2, 7, {"tensor_parallel_degree": 2}), (2, 9, {})):
        ranks = launch(f"{JOBS}:one_run", world, str(tmp_path), until, kind, timeout=100)
        for found in ranks:
            assert not before or found["first"] == before, (world, kind)
            assert found["head"] == until
            assert found["consistent"] == (not before), (world, kind)
            assert any("saved by" in reason for reason in found["reasons"]) == bool(before), (world, kind)
            again = any("reads its part from the beginning" in reason for reason in found["reasons"])
            assert again == bool(before), (world, kind)
        before = ranks[0]["last"]
