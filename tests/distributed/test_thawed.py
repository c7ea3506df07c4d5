"""Test a layer that is thawed in mid-run under DistributedDataParallel, stopped on both sides of that."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import launch
from tests.distributed.thawed import STEPS, THAWN

pytestmark = pytest.mark.long

BEFORE, AFTER = "tests.distributed.thawed:before", "tests.distributed.thawed:after"


@pytest.mark.parametrize(("until", "end"), [(THAWN - 2, "flush"), (THAWN + 1, "kill")])
def test_what_is_frozen_after_attach_is_thawed_exactly(tmp_path: Path, until: int, end: str) -> None:
    whole = launch(AFTER, 2, str(tmp_path / "whole"), STEPS, "")
    assert whole[0]["digest"] == whole[1]["digest"]
    if end == "kill":
        with pytest.raises(AssertionError, match="ended with -9"):
            launch(AFTER, 2, str(tmp_path / "stopped"), until, end)
    else:
        launch(AFTER, 2, str(tmp_path / "stopped"), until, end)
    for found in launch(AFTER, 2, str(tmp_path / "stopped"), STEPS, ""):
        assert (found["step"], found["consistent"], found["errors"]) == (until, True, 0), found
        assert found["digest"] == whole[0]["digest"]


@pytest.mark.parametrize(("until", "exact"), [(THAWN - 2, True), (THAWN + 1, False)])
def test_what_is_frozen_when_it_is_wrapped_is_never_averaged(tmp_path: Path, until: int, exact: bool) -> None:
    launch(BEFORE, 2, str(tmp_path), until, "flush")
    for found in launch(BEFORE, 2, str(tmp_path), until, "flush"):
        assert (found["step"], found["consistent"]) == (until, exact), found
        assert exact or any("ranks had different values" in reason for reason in found["reasons"]), found
