"""Test state that changes between two steps: no rank calls a mix of two states exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import launch

FLUSHED, RESUMED = "tests.distributed.replaced:flushed", "tests.distributed.replaced:resumed"


@pytest.mark.parametrize(("kind", "swapped"), [("ddp", [1]), ("fsdp", [0, 1])])
def test_other_weights_in_place_of_the_trained_ones_are_said(
    tmp_path: Path, kind: str, swapped: list[int]
) -> None:
    launch(FLUSHED, 2, kind, str(tmp_path), swapped, [])
    found = launch(RESUMED, 2, kind, str(tmp_path))
    assert [(one["step"], one["exact"]) for one in found] == [(3, False)] * 2
    for one in found:
        assert any("in place of its parameters" in reason for reason in one["reasons"]), one


@pytest.mark.parametrize(("averaged", "exact"), [([0, 1], True), ([1], False)])
def test_extras_that_change_without_a_step(tmp_path: Path, averaged: list[int], exact: bool) -> None:
    """If a rank has saved other extras since, its state no longer belongs to that of the others."""
    launch(FLUSHED, 2, "fsdp", str(tmp_path), [], averaged)
    found = launch(RESUMED, 2, "fsdp", str(tmp_path))
    assert [(one["step"], one["exact"]) for one in found] == [(3, exact)] * 2
