"""Test ranks that train apart between two averages: a state that is another one on each rank is never called exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from scarctl.ops.evacuate import Process
from scarctl.ops.evacuate import Store as Evacuation
from scarctl.ops.survey import survey
from scarctl.persist.evacuated import Evacuated
from scarctl.state.common import DIFFERED
from scarctl.store import Store
from tests.distributed.launch import launch

FLUSHED, RESUMED = "tests.distributed.averages:flushed", "tests.distributed.averages:resumed"
EVALUATED = "tests.distributed.averages:evaluated"


@pytest.mark.parametrize("mode", ["partial", pytest.param("rollback", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("optimizer", "steps", "exact"),
    [
        pytest.param("SGD", 31, False, id="between two averages"),
        pytest.param("SGD", 30, True, marks=pytest.mark.long, id="at an average"),
        pytest.param(
            "one tensor",
            31,
            False,
            marks=pytest.mark.long,
            id="between two averages, of a rank that owns nothing",
        ),
        pytest.param(
            "Adam", 30, False, marks=pytest.mark.long, id="at an average, with moments that are not averaged"
        ),
    ],
)
def test_a_state_that_is_another_one_on_each_rank(
    tmp_path: Path, optimizer: str, steps: int, exact: bool, mode: str
) -> None:
    for kinds in launch(FLUSHED, 2, str(tmp_path), optimizer, steps):
        # Each comparison of the running ranks comes after an average.
        assert "ranks-differ" not in kinds
    shown = [caveat.kind for caveat in survey(Store.open(f"{tmp_path}/store"), None).caveats]
    if optimizer != "one tensor":  # else one rank has no part that a survey could show
        assert ("ranks-differ" in shown) is not exact
    for found in launch(RESUMED, 2, str(tmp_path), optimizer, "", mode):
        assert (found["step"], found["whole"], found["consistent"]) == (steps, True, exact)
        assert exact or any("ranks had different values" in reason for reason in found["reasons"]), found


@pytest.mark.parametrize(("steps", "exact"), [(31, False), (30, True)])
@pytest.mark.long
def test_an_evacuation_calls_it_exact_only_with_the_reports_of_all_ranks(
    tmp_path: Path, steps: int, exact: bool
) -> None:
    reports = launch("tests.distributed.averages:evacuated", 2, str(tmp_path), "SGD", steps)
    for found in reports:
        assert (found["step"], found["sealed"], found["consistent"]) == (steps, True, False)
        assert "other ranks have copies of the same tensors" in found["reasons"][0]
    processes = [Process("store", rank, 1, Evacuated.from_json(one)) for rank, one in enumerate(reports)]
    store = Evacuation("store", tuple(processes))
    assert (store.safe, store.whole, store.consistent) == (True, True, exact)
    assert store.reasons == (() if exact else (DIFFERED.message,))


@pytest.mark.parametrize("wrapped", ["ddp", "ddp without buffers"])
@pytest.mark.long
def test_statistics_of_batch_norm_may_differ(tmp_path: Path, wrapped: str) -> None:
    """The first rank's replace all others before the next forward pass, or each rank saves its own."""
    launch(FLUSHED, 2, str(tmp_path), "Adam", 5, wrapped)
    assert [
        (one["step"], one["consistent"]) for one in launch(RESUMED, 2, str(tmp_path), "Adam", wrapped)
    ] == [(5, True)] * 2
