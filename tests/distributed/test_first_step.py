"""Test that no rank begins if one cannot begin to save."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import launch


@pytest.mark.parametrize("before", [pytest.param("nothing", marks=pytest.mark.long), "a run of one process"])
def test_what_keeps_one_rank_from_saving_is_raised_on_all(tmp_path: Path, before: str) -> None:
    if before != "nothing":
        launch("tests.distributed.jobs:descend", 1, str(tmp_path), 3, {})
    found = launch("tests.distributed.first_step:starved", 2, str(tmp_path))
    reason = "RuntimeError: can't start new thread"
    assert found == [f"ScarError: rank 1: {reason}", reason]
