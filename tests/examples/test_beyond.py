"""Test that the models beyond the paper's train, fail and recover, and that moments are set as the study demands."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch

from examples.beyond import workloads
from scarctl.simulate.study import Study
from scarctl.simulate.trial import run_trial

NAMES = [
    "embedding_adagrad_8",
    "embedding_adam_stale",
    "experts",
    "transformer_zeroed",
    "transformer_32",
    "lora",
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "WORDS", 200)
    monkeypatch.setattr(workloads, "BASE", 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.long) for name in NAMES[1:])]
)
def test_a_failure_and_all_ways_back(name: str) -> None:
    study = Study(
        workload=f"examples.beyond.workloads:{name}", interval=8, iterations=12, fail_after=9,
        fractions=(Fraction(1), Fraction(1, 8)), policies=("priority",),
    )  # fmt: skip
    result = run_trial(study, getattr(workloads, name)(), 0)
    assert result["same"]
    # A rollback is exact: one iteration was done after the full checkpoint.
    assert result["rework"][0] == 1
    assert all(result["perturbation"])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["restored", "kept", "zeroed", "stale"])
def test_moments_of_lost_rows(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "STALE", 4)
    workload: Any = workloads.experts()
    workload.moments = how
    workload.reset(0)
    moments = {}
    for iteration in range(1, 8):
        workload.step(iteration)
        _, optimizer = workload.state()
        weight = workload.state()[0].logits.weight
        moments[iteration] = optimizer.state[weight]["exp_avg"].clone()
    before = [weight.detach().clone(), moments[7]]
    restored = torch.full_like(weight[:5], 0.5)
    expected = {
        "restored": torch.full_like(restored, 7.0),
        "kept": moments[7][:5],
        "zeroed": torch.zeros_like(restored),
        "stale": moments[4][:5],
    }
    # All ways continue from the same failure, and the run returns to it for the next one.
    for _ in range(2):
        with torch.no_grad():
            weight.copy_(before[0])
            optimizer.state[weight]["exp_avg"].copy_(before[1])
            weight[:5] = restored
            optimizer.state[weight]["exp_avg"][:5] = 7.0
        workload.extras["position"]["done"] = 7
        workload.recompute()
        found = optimizer.state[weight]["exp_avg"]
        assert torch.equal(found[:5], expected[how])
        assert torch.equal(found[5:], moments[7][5:])
        assert torch.equal(weight[:5], restored)
        for iteration in range(8, 11):
            workload.step(iteration)
