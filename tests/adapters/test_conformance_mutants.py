"""Test the conformance suite with broken adapters: for each defect, the failing test and its message."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from scarctl.testing import leaks
from scarctl_adapters.torch import TorchAdapter
from tests.adapters import mutants
from tests.adapters.torch.test_conformance import TorchTraining

FOUND: dict[type[TorchAdapter] | type[TorchTraining], tuple[str, str]] = {
    mutants.TurnsOrder: ("the_layout_is_stable", "in another order"),
    mutants.OrderOfHashes: ("a_killed_run_continues_bit_for_bit", "in another order"),
    mutants.NamesOfAddresses: ("the_layout_is_stable", "the groups are"),
    mutants.SameMemoryTwice: ("the_layout_is_stable", "are the same memory"),
    mutants.WindowsOverlap: ("partial_recovery_touches_only_the_lost_rows", "were changed"),
    mutants.ForgetsBuffers: ("a_closed_run_continues_bit_for_bit", r"not restored: \['norm.running_mean"),
    mutants.SlotsAsExtras: (
        "all_values_of_a_group_are_recovered_together",
        r"not as they were saved: .*exp_avg",
    ),
    mutants.LeavesFactored: (
        "optimizer_state_of_another_shape",
        "leaves something behind: .*exp_avg_sq|row_var",
    ),
    mutants.Copies: ("partial_recovery_touches_only_the_lost_rows", "were not restored"),
    mutants.Upcasts: ("tensors_of_a_dtype_that_numpy_lacks", "has no such tensor"),
    mutants.ForgetsExtras: (
        "a_closed_run_continues_bit_for_bit",
        "extras that were not restored: .*position",
    ),
    mutants.ForgetsRandomNumbers: ("a_closed_run_continues_bit_for_bit", "generators torch"),
    mutants.KeepsSlots: ("slots_made_for_a_resume_can_be_taken_away", "does not remove all slots"),
    mutants.ChangesBeforeRefusing: ("another_model_is_refused", "has other values"),
    mutants.TakesAnything: ("another_model_is_refused", "not its own"),
    mutants.KeepsHooks: ("nothing_refers_to_a_closed_session", "still referenced"),
    mutants.CountsTwice: ("hooks_are_called_around_every_iteration", "has counted 2"),
    mutants.NeverBefore: ("hooks_are_called_around_every_iteration", "`before` comes first"),
    mutants.AfterTooEarly: ("hooks_are_called_around_every_iteration", "comes before these are changed"),
    mutants.KeepsModel: ("nothing_of_the_training_outlives_it", "model"),
    mutants.KeepsThread: ("runs_one_after_the_other_leave_nothing_in_the_process", "thread forgotten"),
    mutants.KeepsHandler: (
        "runs_one_after_the_other_leave_nothing_in_the_process",
        "other handlers: .*SIGUSR1",
    ),
    mutants.KeepsFile: ("runs_one_after_the_other_leave_nothing_in_the_process", "open files"),
    mutants.NeverSeals: ("a_closed_run_continues_bit_for_bit", "resumed after iteration 1, not 3"),
    mutants.SwallowsExceptions: ("an_exception_in_the_loop_comes_through", "swallowed"),
    mutants.IgnoresSnapshot: ("a_snapshot_is_resumed_by_its_name", "resumed after iteration 5, not 2"),
    mutants.WaitsForStore: (
        "a_store_that_fails_does_not_end_the_run",
        "the store is missing|has not finished yet",
    ),
    mutants.CountsItself: ("hooks_are_called_around_every_iteration", "would count each twice"),
}


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Drop at the end of a test what mutants keep on purpose."""
    monkeypatch.setattr(leaks, "GRACE", 0.2)
    mutants.KeepsThread.end.clear()
    yield
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    mutants.KeepsModel.kept.clear()
    mutants.KeepsThread.end.set()
    while mutants.KeepsFile.kept:
        mutants.KeepsFile.kept.pop().close()


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(one, marks=[pytest.mark.long] * (one is mutants.OrderOfHashes)) for one in FOUND],
    ids=lambda mutant: mutant.__name__,
)
def test_a_defect_is_found(mutant: type[TorchAdapter] | type[TorchTraining], tmp_path: Path) -> None:
    name, said = FOUND[mutant]
    with pytest.raises(Exception, match=said):
        getattr(mutants.suite_of(mutant)(), f"test_{name}")(tmp_path)
