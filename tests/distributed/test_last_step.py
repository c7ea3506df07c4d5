"""Test that ranks which get a signal at different moments save the same step."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.launch import launch
from tests.distributed.signalled import STEPS


def test_a_rank_that_got_the_signal_a_step_earlier_makes_that_step(tmp_path: Path) -> None:
    results = launch("tests.distributed.signalled:a_step_apart", 2, str(tmp_path / "store"))
    assert results == [[STEPS, STEPS]] * 2
