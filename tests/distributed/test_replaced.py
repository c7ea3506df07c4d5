"""Test state that changes between two steps: no rank calls a mix of two states exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import launch

FLUSHED, RESUMED = "tests.distributed.replaced:flushed", "tests.distributed.replaced:resumed"
DIVERGED, REGROUPED = "tests.distributed.replaced:diverged", "tests.distributed.replaced:regrouped"


@pytest.mark.parametrize(("averaged", "exact"), [([0, 1], True), ([1], False)])
@pytest.mark.long
def test_extras_that_change_without_a_step(tmp_path: Path, averaged: list[int], exact: bool) -> None:
    """If a rank has saved other extras since, its state no longer belongs to that of the others."""
    launch(FLUSHED, 2, str(tmp_path), averaged)
    found = launch(RESUMED, 2, "fsdp", str(tmp_path))
    assert [(one["step"], one["consistent"]) for one in found] == [(3, exact)] * 2
    for one in found:
        assert exact or "saved several times" in "; ".join(one["reasons"])


@pytest.mark.parametrize("ranks", [pytest.param([], marks=pytest.mark.long), [1]])
def test_replicas_that_diverge_are_said(tmp_path: Path, ranks: list[int]) -> None:
    found = launch(DIVERGED, 2, str(tmp_path), ranks)
    assert ["ranks-differ" in kinds for kinds in found] == [bool(ranks)] * 2
    again = launch(RESUMED, 2, "ddp", str(tmp_path))
    assert [one["consistent"] for one in again] == [not ranks] * 2
    for one in again:
        assert not ranks or any("ranks have different values" in reason for reason in one["reasons"])


@pytest.mark.long
def test_a_param_group_of_one_rank_alone_makes_no_rank_wait(tmp_path: Path) -> None:
    first, second = launch(REGROUPED, 2, str(tmp_path), [1])
    assert first["error"] == ""
    assert "Adam has other param_groups" in second["error"]
    assert max(first["seconds"], second["seconds"]) < 60
    found = launch(RESUMED, 2, "ddp", str(tmp_path))
    # The second rank could save nothing after the first step, so that is the newest state of one step.
    assert all((one["step"], one["consistent"]) == (1, True) for one in found), found
