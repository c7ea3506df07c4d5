"""Test ranks that train apart between two averages: a state that is another one on each rank is never called exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from scarctl.ops.survey import survey
from scarctl.store import Store
from tests.distributed.launch import launch

FLUSHED, RESUMED = "tests.distributed.averages:flushed", "tests.distributed.averages:resumed"


@pytest.mark.parametrize(
    ("optimizer", "steps", "exact"),
    [
        pytest.param("SGD", 31, False, marks=pytest.mark.long, id="between two averages"),
        pytest.param("SGD", 30, True, marks=pytest.mark.long, id="at an average"),
        pytest.param(
            "Adam", 30, False, marks=pytest.mark.long, id="at an average, with moments that are not averaged"
        ),
    ],
)
def test_a_state_that_is_another_one_on_each_rank(
    tmp_path: Path, optimizer: str, steps: int, exact: bool
) -> None:
    for kinds in launch(FLUSHED, 2, str(tmp_path), optimizer, steps):
        # Each comparison of the running ranks comes after an average.
        assert "ranks-differ" not in kinds
    shown = [caveat.kind for caveat in survey(Store.open(f"{tmp_path}/store"), None).caveats]
    assert ("ranks-differ" in shown) is not exact
    for found in launch(RESUMED, 2, str(tmp_path), optimizer):
        assert (found["step"], found["whole"], found["consistent"]) == (steps, True, exact)
        assert exact or any("ranks had different values" in reason for reason in found["reasons"]), found
