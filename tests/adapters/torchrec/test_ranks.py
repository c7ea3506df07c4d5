"""Test two ranks that train tables sharded by TorchRec: stopped, resumed, under the same plan and another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.adapters.rank_checks import check_halves
from tests.distributed.launch import launch

pytest.importorskip("torchrec", reason="TorchRec is not installed here: `make frameworks`")

JOBS = "tests.adapters.torchrec.jobs"
PLANS: list[Any] = [
    *("table", "row", "column", "mixed", "copies", "dense"),
    *(["table", "sgd"], ["row", "rowwise"], ["column", "rowwise"]),
]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_resumed_run_is_the_undisturbed_one(tmp_path: Path) -> None:
    """Under every plan, whole tables, states of fused and dense optimizers and learning rates are equal bit for bit."""
    assert len(list(check_halves(JOBS, tmp_path, PLANS, timeout=300))) == 2 * len(PLANS)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_another_plan_takes_over_the_same_values(tmp_path: Path) -> None:
    pairs = [
        *(("table", "row"), ("row", "column"), ("column", "mixed"), ("mixed", "swapped")),
        (["table", "rowwise"], ["row", "rowwise"]),
        (["row", "rowwise"], ["swapped", "rowwise"]),
    ]
    for of_rank in launch(f"{JOBS}:resharded", 2, str(tmp_path), pairs, timeout=300):
        for pair, (ended, moved) in zip(pairs, of_rank, strict=True):
            assert moved["first"] == ended["last"], pair
            assert moved["step"] == 4, pair
            assert not moved["consistent"], pair
            assert [reason.partition(":")[0] for reason in moved["reasons"]] == [
                "saved by 2 ranks that divided the state otherwise"
            ]
            assert moved["last"] != moved["first"], pair


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_lookups_say_which_rows_of_a_part_change(tmp_path: Path) -> None:
    """Row numbers refer to this rank's part, whichever ranks have requested the rows."""
    plans = ["table", "row", "column", "mixed", ["column", "rowwise"]]
    of_ranks = launch(f"{JOBS}:touched", 2, plans, timeout=150)
    assert sum(len(found) for found in of_ranks) == 3 + 6 + 6 + 5 + 6
    for found in of_ranks:
        for name, touched, changed in found:
            assert touched == changed, name
            assert changed, name


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sigterm_in_a_backward_pass_loses_nothing(tmp_path: Path) -> None:
    """Tables and dense parameters are of one step, and the rest of the run equals an undisturbed one."""
    whole = launch(f"{JOBS}:one_run", 1, str(tmp_path / "whole"), 8, "table", timeout=100)[0]
    with pytest.raises(AssertionError, match="rank 0 ended with -15"):
        launch(f"{JOBS}:stopped_in_backward", 1, str(tmp_path / "stopped"), timeout=100)
    resumed = launch(f"{JOBS}:one_run", 1, str(tmp_path / "stopped"), 8, "table", timeout=100)[0]
    assert resumed["step"] in (4, 5)
    assert resumed["consistent"], resumed["reasons"]
    assert resumed["last"] == whole["last"]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_lost_tables_come_back_in_the_running_job(tmp_path: Path) -> None:
    """Slots with one number per row are restored as they were saved; those of the other rank stay."""
    first, second = launch(f"{JOBS}:recovered", 2, str(tmp_path), timeout=150)
    assert first["tables"] == second["tables"] == 6
    assert (first["as_saved"], first["as_before"]) == (False, True)
    assert (second["as_saved"], second["as_before"]) == (True, False)
    assert second["restored"] == 3 + 1  # parts of tables, and what this rank owns of the dense part
