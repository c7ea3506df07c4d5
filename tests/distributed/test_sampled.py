"""Test a `DistributedSampler` with `set_epoch` among ranks: it resumes exactly, or the session reports it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import torchrun

pytestmark = pytest.mark.long

NEVER = 99


def job(folder: Path, way: str, dies_at: int, dying: str = "-") -> list[dict[str, Any]]:
    folder.mkdir()
    torchrun("tests.distributed.sampled", str(folder), way, str(dies_at), dying, world=2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.leaves_arena
def test_a_killed_job_continues_with_the_data_that_came_next(tmp_path: Path) -> None:
    whole = job(tmp_path / "whole", "epochs", NEVER)
    assert whole[0]["digest"] == whole[1]["digest"]
    found = job(tmp_path / "killed", "epochs", 6, "01")
    assert [(rank["consistent"], rank["reasons"]) for rank in found] == [(True, [])] * 2
    assert 0 < found[0]["step"] == found[1]["step"] <= 6
    assert [rank["digest"] for rank in found] == [whole[0]["digest"]] * 2


@pytest.mark.leaves_arena
def test_by_hand_it_begins_the_epoch_again_and_says_so(tmp_path: Path) -> None:
    found = job(tmp_path / "killed", "by-hand", 6, "01")
    assert "not the one that came next" in " ".join(found[0]["reasons"] + found[1]["reasons"])
    assert not all(rank["consistent"] for rank in found)
