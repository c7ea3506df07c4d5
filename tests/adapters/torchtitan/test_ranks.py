"""Two ranks train under torchtitan's Trainer: stopped, killed, resumed, on as many ranks and on another number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.adapters.rank_checks import check_halves, check_killed_after_whole, check_killed_later
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
def test_a_rank_killed_after_a_whole_checkpoint_is_not_missed(tmp_path: Path) -> None:
    """SIGKILL; torchrun starts all again, and the run ends bit for bit like an undisturbed one."""
    check_killed_after_whole(JOBS, tmp_path, {})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_killed_later_loses_its_own_parts_only(tmp_path: Path) -> None:
    """Two steps after the whole checkpoint, whose copies are the newest ones of what only rank 1 had."""
    check_killed_later(JOBS, tmp_path, {})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_lost_parts_come_back_in_the_running_job(tmp_path: Path) -> None:
    """Those of rank 1 as they were saved; nothing of rank 0 changes."""
    zero, one = launch(f"{JOBS}:recovered", 2, str(tmp_path), {}, timeout=150)
    for found in (zero, one):
        assert not found["problems"]
        assert found["head"] == 8
        assert len(found["losses"]) == 8
    assert all(zero["same"])
    assert not all(one["same"])
    assert (
        sum(one["back"]) >= len(one["back"]) // 2
    )  # a later checkpoint, of a quarter each, has saved the rest


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
