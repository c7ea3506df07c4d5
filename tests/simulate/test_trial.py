"""Test trials of small workloads: what is restored, its cost, and that all randomness comes from the seed."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from scarctl.errors import UsageError
from scarctl.simulate.study import Study
from scarctl.simulate.summary import summarise
from scarctl.simulate.trial import PATIENCE, Known, _failure, _stratified, run_trial
from tests.simulate.workloads import Diverging, Dropout, Overshoot, Quadratic, Unseeded

HALF, EIGHTH = Fraction(1, 2), Fraction(1, 8)


def study(**settings: Any) -> Study:
    return Study(**{"workload": "tests.simulate.workloads:quadratic", "interval": 16, **settings})


class TestCosts:
    @pytest.mark.long
    def test_priority_and_partial_recovery_pay_on_a_quadratic(self) -> None:
        of = study(fractions=(Fraction(1), EIGHTH))
        summary = summarise(of, [run_trial(of, Quadratic(), trial) for trial in range(60)])
        rework = {(line.cell.mode, line.cell.policy): line.rework for line in summary.cells}
        assert summary.irreproducible == 0
        assert rework["partial", "full"].high < rework["rollback", "full"].mean  # type: ignore[operator]
        assert rework["partial", "priority"].high < rework["partial", "round"].mean  # type: ignore[operator]
        assert rework["partial", "round"].high < rework["partial", "random"].mean  # type: ignore[operator]
        reduction = next(line.reduction for line in summary.cells if line.cell.policy == "priority")
        assert reduction is not None
        assert reduction.low is not None
        assert reduction.low > 0.4

    def test_half_of_the_state_perturbs_by_half_the_square(self) -> None:
        """Theorem 4.2 holds, from the same checkpoint."""
        of = study(fractions=(Fraction(1),))
        norms = np.array([run_trial(of, Quadratic(), trial)["perturbation"] for trial in range(80)])
        rollback, partial = np.sum(norms**2, axis=0)
        assert partial / rollback == pytest.approx(0.5, abs=0.06)

    def test_a_rollback_costs_what_came_after_the_checkpoint(self) -> None:
        of = study(modes=("rollback",))
        for trial in range(20):
            result = run_trial(of, Quadratic(), trial)
            after = result["failed_after"]
            newest = max(1, after // 16 * 16)
            assert result["rework"] == [after - newest]

    def test_a_loss_may_be_a_gain(self) -> None:
        of = study(fractions=(Fraction(1),), modes=("partial",), interval=60)
        costs = [run_trial(of, Overshoot(), trial)["rework"][0] for trial in range(12)]
        assert min(costs) < 0 < max(costs)


def test_everything_comes_back_from_a_full_checkpoint() -> None:
    """Moments, counts, running statistics and random numbers are restored, or the repeated iterations would differ."""
    of = study(interval=4, fractions=(Fraction(1), HALF), policies=("priority",))
    for trial in range(4):
        result = run_trial(of, Dropout(), trial)
        assert result["same"]
        after = result["failed_after"]
        assert of.cells()[0].mode == "rollback"
        assert result["rework"][0] == after - max(1, after // 4 * 4)


class _Watched(Quadratic):
    """Records the state after every iteration of each run, and the state with which each iteration began."""

    def reset(self, seed: int) -> None:
        super().reset(seed)
        self.history, self.begun = [self._state["x"].copy()], []

    def step(self, iteration: int) -> None:
        self.begun.append((iteration, self._state["x"].copy()))
        super().step(iteration)
        if len(self.history) == iteration:
            self.history.append(self._state["x"].copy())


def test_what_was_lost_is_of_the_checkpoint_and_the_rest_of_the_failure() -> None:
    of = study(fractions=(Fraction(1),), modes=("partial",), interval=8)
    for trial in range(8):
        workload = _Watched()
        after = run_trial(of, workload, trial)["failed_after"]
        state = next(x for iteration, x in workload.begun[after:] if iteration == after + 1)
        newest = max(1, after // 8 * 8)
        old = (state == workload.history[newest]).all(axis=1)
        now = (state == workload.history[after]).all(axis=1)
        assert (old | now).all()
        if newest != after:
            assert old.sum() == now.sum() == 32


class TestChance:
    def test_the_seed_and_the_number_decide_all(self) -> None:
        of, workload = study(fractions=(EIGHTH,)), Quadratic()
        first = [run_trial(of, workload, trial) for trial in (0, 1, 2)]
        assert [run_trial(of, Quadratic(), trial) for trial in (2, 0, 1)] == [first[2], first[0], first[1]]
        assert run_trial(study(fractions=(EIGHTH,), seed=1), workload, 0) != first[0]
        assert len({str(result) for result in first}) == 3

    def test_a_run_that_the_seed_does_not_decide_is_noticed(self) -> None:
        assert not run_trial(study(fractions=(Fraction(1),)), Unseeded(), 0)["same"]

    @pytest.mark.parametrize("stratify", [False, True])
    @pytest.mark.parametrize("rate", [None, 0.05, 0.5])
    def test_failures_are_drawn_from_their_distribution(self, rate: float | None, stratify: bool) -> None:
        of = study(failure_rate=rate, stratify=stratify)
        last, chances = 30, (np.arange(30_000) + 0.5) / 30_000
        drawn = np.array([_failure(of, last + 1, chance) for chance in chances])
        weights = np.ones(last) if rate is None else (1 - rate) ** np.arange(last)
        shares = np.bincount(drawn, minlength=last + 1) / len(chances)
        assert np.allclose(shares[1:], weights / weights.sum(), atol=1e-4)
        if not stratify:
            assert _failure(of, last + 1, 0.0) == 1
            assert _failure(of, last + 1, np.nextafter(1.0, 0.0)) == last

    def test_strata_are_spread_evenly_over_the_time_since_a_full_checkpoint(self) -> None:
        """The mean cost of a rollback, 7.5 in every block of 16 trials, then hardly depends on chance."""
        of = study(modes=("rollback",), stratify=True)
        chance = np.random.default_rng(0)
        for block in range(20):
            trials = range(16 * block, 16 * block + 16)
            drawn = [_failure(of, 161, _stratified(of, trial, chance.random())) for trial in trials]
            assert sorted(moment % 16 for moment in drawn) == list(range(16))
        other = [_failure(study(), 161, chance.random()) % 16 for _ in range(16)]
        assert len(set(other)) < 16


class _Flickering(Quadratic):
    """Shows a metric with noise of 20 % that belongs to the iteration, as a batch's does."""

    iterations = 120

    def reset(self, seed: int) -> None:
        super().reset(seed)
        self._noise = np.random.default_rng(seed).normal(0, 0.2, 1000)
        self._curvature[:] = 0.03
        self.extras = {"at": {"iteration": 0}}

    def step(self, iteration: int) -> None:
        super().step(iteration)
        self.extras["at"]["iteration"] = iteration

    def metric(self) -> float:
        return super().metric() * (1 + self._noise[self.extras["at"]["iteration"]])


class _Still(_Flickering):
    """Trains alike, and shows the metric without noise."""

    def reset(self, seed: int) -> None:
        super().reset(seed)
        self._noise[:] = 0


@pytest.mark.long
def test_a_smoothed_metric_costs_nearer_to_the_truth() -> None:
    """A lucky value ends a run too early, and one that is the target ends no other run for a long time."""

    def costs(workload: Quadratic, smooth: int) -> NDArray[np.float64]:
        of = study(fractions=(Fraction(1),), modes=("partial",), smooth=smooth, iterations=120)
        return np.array([run_trial(of, workload, trial)["rework"][0] for trial in range(40)], np.float64)

    truth = costs(_Still(), 1)
    errors = {smooth: costs(_Flickering(), smooth) - truth for smooth in (1, 16)}
    spread = {smooth: float(np.sqrt(np.mean(error**2))) for smooth, error in errors.items()}
    assert spread[16] < spread[1] / 2, spread
    assert abs(costs(_Still(), 16) - truth).mean() < 0.5, "without noise it costs the same"


def test_a_smoothed_rollback_costs_what_it_repeats() -> None:
    of = study(modes=("rollback",), smooth=8)
    for trial in range(6):
        result = run_trial(of, _Flickering(), trial)
        assert result["rework"] == [result["rollback_steps"]]


def test_the_oldest_copy_of_every_parameter_is_shown() -> None:
    """Nothing of `still` changes. Little of `slow` does, so priority never saves it, and taking turns does."""

    class Two(Quadratic):
        rows = {"*": 1}  # noqa: RUF012

        def reset(self, seed: int) -> None:
            super().reset(seed)
            self._state |= {"slow": np.zeros((8, 1)), "still": np.zeros((8, 1))}

        def step(self, iteration: int) -> None:
            super().step(iteration)
            self._state["slow"] += 1e-9

    of = study(fractions=(EIGHTH,), policies=("priority", "round"), fail_after=50)
    result = run_trial(of, Two(), 0)
    back, priority, turns = result["oldest"]
    assert back is None
    assert (priority["slow"], priority["still"]) == (49, 0)
    assert 0 < turns["slow"] <= 20
    assert summarise(of, [result]).cells[1].oldest == priority


class Counted(Quadratic):
    """Counts its iterations, over all runs."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def step(self, iteration: int) -> None:
        super().step(iteration)
        self.steps += 1


def test_equal_states_are_trained_once() -> None:
    """Before a second checkpoint all policies have saved the same, so both give the same state."""
    short = {"fractions": (HALF,), "modes": ("partial",), "fail_after": 7}
    both, one = study(policies=("round", "random"), **short), study(policies=("round",), **short)
    twice, once = Counted(), Counted()
    result, alone = run_trial(both, twice, 0), run_trial(one, once, 0)
    assert result["rework"] == 2 * alone["rework"]
    assert twice.steps == once.steps
    # A second study of the same training repeats nothing but the run up to the failure, and finds the same.
    known = Known()
    for of in (one, both):
        before = once.steps
        result = run_trial(of, once, 0, known)
    assert once.steps - before == 7
    assert result == run_trial(both, Counted(), 0)
    assert run_trial(both, once, 1, known) == run_trial(both, Counted(), 1) != result


def test_bytes_that_were_written() -> None:
    """Every way keeps to its budget. Random and in turn they write all of it, as everything changes."""
    of = study(fractions=(Fraction(1), EIGHTH), fail_after=50)
    result = run_trial(of, Quadratic(), 0)
    assert result["written"] == pytest.approx([1, 1, 1, 1, 1, 1])
    assert summarise(of, [result]).cells[2].written == pytest.approx(1)
    early = run_trial(study(fractions=(Fraction(1),), fail_after=2), Quadratic(), 0)
    assert early["written"] == [None, None]
    assert summarise(study(fractions=(Fraction(1),)), [early]).cells[1].written is None

    class Half(Quadratic):
        """One row in sixteen moves, which is half of an eighth."""

        def step(self, iteration: int) -> None:
            before = self._state["x"].copy()
            super().step(iteration)
            still = np.arange(len(before)) % 16 > 0
            self._state["x"][still] = before[still]

    result = run_trial(
        study(fractions=(EIGHTH,), policies=("aged",), iterations=60, fail_after=50), Half(), 0
    )
    assert result["written"][1] == pytest.approx(0.5)


class TestRefused:
    @pytest.mark.parametrize(
        ("settings", "says"),
        [
            ({"target": -1.0}, "does not reach"),
            ({"target": 1e9}, "after its first iteration"),
            ({"fail_after": 60}, "cannot fail after 60"),
        ],
    )
    def test_targets_that_cannot_be(self, settings: dict[str, float], says: str) -> None:
        with pytest.raises(UsageError, match=says):
            run_trial(study(**settings), Quadratic(), 0)

    def test_a_metric_that_is_no_number(self) -> None:
        with pytest.raises(UsageError, match="nan after iteration 1"):
            run_trial(study(), Diverging(), 0)

    def test_a_run_that_never_arrives_is_given_up(self) -> None:
        class Stuck(Quadratic):
            """Does not move once it has repeated an iteration."""

            def reset(self, seed: int) -> None:
                super().reset(seed)
                self.newest = 0

            def step(self, iteration: int) -> None:
                if iteration > self.newest:
                    super().step(iteration)
                    self.newest = iteration
                else:
                    self._state["x"][:] = 1e3

        of = study(modes=("rollback",), interval=60)
        result = run_trial(of, Stuck(), 1)
        assert result["failed_after"] > 1
        assert result["arrived"] == [False]
        assert result["rework"] == [(PATIENCE - 1) * result["undisturbed"]]
        assert summarise(of, [result]).cells[0].given_up == 1


def test_state_that_follows_from_the_rest_is_made_again() -> None:
    class Doubled(Quadratic):
        """Its metric is computed from a copy, which a recovery must renew."""

        def reset(self, seed: int) -> None:
            super().reset(seed)
            self.made = 0
            self.recompute()

        def recompute(self) -> None:
            self.made += 1
            self.copy = self._state["x"].copy()

    of = study(fractions=(Fraction(1),), modes=("rollback", "partial"))
    workload = Doubled()
    run_trial(of, workload, 0)
    assert workload.made == 1 + 2
