"""Test that no rank begins if one cannot begin to save."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.launch import launch


def test_what_keeps_one_rank_from_saving_is_raised_on_all(tmp_path: Path) -> None:
    launch("tests.distributed.first_step:descend", 1, str(tmp_path))
    found = launch("tests.distributed.first_step:starved", 2, str(tmp_path))
    reason = "RuntimeError: can't start new thread"
    assert found == [f"ScarError: rank 1: {reason}", reason]
