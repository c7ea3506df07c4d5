"""Test the example: a killed rank's rows go back, and all ranks continue."""

from __future__ import annotations

import pytest

from tests.adapters.rank_checks import lost_rank

pytest.importorskip("torchtitan", reason="torchtitan is not installed here: `make frameworks`")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("usual_saver")
def test_a_rank_of_the_example_is_killed() -> None:
    step, _ = lost_rank("torchtitan_llama", 32)
    assert 20 <= step < 32
