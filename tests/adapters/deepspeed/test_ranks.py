"""Two ranks train under DeepSpeed's engine: stopped, resumed, on as many ranks and on another number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.adapters.rank_checks import check_halves
from tests.distributed.launch import launch

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed here: `make frameworks`")

JOBS = "tests.adapters.deepspeed.jobs"
KINDS: list[dict[str, Any]] = [
    *({"stage": stage, "precision": precision} for stage in (1, 2, 3) for precision in ("bf16", "fp32")),
    {"stage": 1, "accumulation": 3},
    {"stage": 2, "accumulation": 2, "round_robin_gradients": True, "groups": 1},
    {"stage": 2, "parameter_alignment": True},
    {"stage": 3, "accumulation": 2, "sub_group_size": 20},
    *(
        {
            "stage": stage,
            "offload_optimizer": {"device": "cpu"},
            "also": {"zero_force_ds_cpu_optimizer": False},
        }
        for stage in (2, 3)
    ),
]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_resumed_run_is_the_undisturbed_one(tmp_path: Path) -> None:
    """Bit for bit: master weights, slots, the model's own weights, counters, schedules."""
    assert len(list(check_halves(JOBS, tmp_path, KINDS, timeout=400))) == 2 * len(KINDS)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", [2, 3])
def test_lost_runs_come_back_in_the_running_job(tmp_path: Path, stage: int) -> None:
    """And the model's weights on all ranks are those of the master weights."""
    for found in launch(f"{JOBS}:recovered", 2, str(tmp_path), {"stage": stage}, timeout=150):
        assert not found["problems"]
        assert found["mixed"]
        assert found["went_back"]
        assert found["stayed"]
        assert found["weights"]
        assert found["finite"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_another_number_of_ranks_and_another_stage_take_over(tmp_path: Path) -> None:
    """The same values, divided otherwise: two ranks, then one, then three, then two."""
    ways: list[tuple[int, int, dict[str, Any]]] = [
        (2, 3, {"stage": 1}),
        (1, 5, {"stage": 3, "sub_group_size": 30, "accumulation": 2}),
        (3, 6, {"stage": 3}),
        (2, 8, {"stage": 2}),
    ]
    before: dict[str, str] = {}
    for world, until, kind in ways:
        found = launch(f"{JOBS}:one_run", world, str(tmp_path), until, kind, timeout=120)[0]
        now = {name: value for name, value in found["first"].items() if name not in APART}
        assert not before or now == {name: before[name] for name in now}, (world, kind)
        assert found["consistent"] == (not before), found["reasons"]
        assert not before or [reason.partition(" ")[0] for reason in found["reasons"]] == ["saved"]
        assert found["head"] == until
        before = found["last"]


APART = ("engine", "mean")
"""Counted by the ranks of a batch, and each rank's own."""
