"""Test fitting how parameters continue: what it learns, from which values, and when it does nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from scarctl.checkpoint.trend import PARTITIONS, VALUES, Trend
from scarctl.state.layout import Layout, TensorSpec, build_layout
from scarctl.theory.extrapolation import Fits, reach


def learn(fits: Fits, dy: float, dd: float, yy: float) -> None:
    fits.learn(*(np.array([value]) for value in (dy, dd, yy)))


class TestFits:
    def test_it_finds_the_factor_and_starts_at_none(self) -> None:
        fits = Fits(1)
        assert fits.factor == 0
        for _ in range(40):
            learn(fits, dy=0.6 * 2.0, dd=2.0, yy=5.0)
        # One checkpoint's weight of about ten says 0.
        assert fits.factor == pytest.approx(0.6 * 10 / 11, rel=0.02)
        a = float(fits.factor[0])
        assert fits.gain == pytest.approx((2 * a * 1.2 - a * a * 2.0) / 5.0, rel=0.05)
        assert fits.movement(np.array([4.0])) == pytest.approx(10.0)

    @pytest.mark.parametrize("dy", [-1.0, 0.0])
    def test_what_does_not_help_is_not_used(self, dy: float) -> None:
        fits = Fits(1)
        for _ in range(10):
            learn(fits, dy, 1.0, 1.0)
        assert fits.factor == 0

    def test_chance_is_not_used(self) -> None:
        """The guesses help now and then, by about as much as they harm otherwise."""
        fits = Fits(1)
        learn(fits, 1.0, 1.0, 1.0)
        learn(fits, 1.0, 1.0, 1.0)
        assert fits.factor > 0
        for dy in (-0.4, 0.9, -0.3, 0.8, -0.5, 0.9):
            learn(fits, dy, 1.0, 1.0)
        assert fits.candidate > 0
        assert fits.factor == 0

    def test_what_turns_to_harm_is_stopped(self) -> None:
        fits = Fits(1)
        for _ in range(5):
            learn(fits, 1.0, 1.0, 1.0)
        assert fits.factor > 0.7
        for _ in range(3):
            learn(fits, -1.0, 1.0, 1.0)
        assert fits.factor == 0

    @pytest.mark.parametrize(
        "wrong",
        [(np.nan, 1.0, 1.0), (1.0, np.inf, 1.0), (0.0, 0.0, 1.0), (1.0, 1.0, 0.0), (1.0, 1.0, 5e-324)],
    )
    def test_nothing_is_learnt_from_nothing(self, wrong: tuple[float, float, float]) -> None:
        fits = Fits(1)
        learn(fits, *wrong)
        assert not fits.to_array().any()

    def test_what_stands_still_is_not_taken_to_go_on(self) -> None:
        fits = Fits(2)
        for _ in range(5):
            fits.learn(np.ones(2), np.ones(2), np.ones(2))
        fits.learn(np.zeros(2), np.array([1.0, 0.0]), np.zeros(2))
        assert fits.factor[0] == 0
        assert fits.factor[1] > 0.7, "of that one nothing was guessed"

    def test_it_never_goes_further_than_one_gap(self) -> None:
        fits = Fits(1)
        for _ in range(20):
            learn(fits, 5.0, 1.0, 30.0)
        assert fits.factor == 1

    def test_groups_are_fitted_apart(self) -> None:
        fits = Fits(3)
        for _ in range(10):
            fits.learn(np.array([1.0, -1.0, np.nan]), np.ones(3), np.ones(3))
        assert fits.factor[0] > 0.8
        assert (fits.factor[1:] == 0).all()

    @pytest.mark.parametrize(
        "wrong",
        [
            None,
            "sums",
            np.zeros((4, 2)),
            np.zeros((4, 1), dtype=np.float32),
            np.full((4, 1), np.nan),
            np.full((4, 1), -1.0),
        ],
    )
    def test_what_is_no_fit_tells_nothing(self, wrong: Any) -> None:
        assert not Fits.from_array(wrong, 1).to_array().any()


def test_reach_is_the_share_of_the_last_gap_and_at_most_all_of_it() -> None:
    assert reach([0, 5, 20, 3], [10, 10, 10, 0]).tolist() == [0, 0.5, 1, 0]


def layout(*shapes: tuple[int, ...], rows: int = 1, dtype: str = "F32") -> Layout:
    groups = [(f"g{n}", "parameter", (TensorSpec("", dtype, shape),), None) for n, shape in enumerate(shapes)]
    return build_layout(groups, rows={"*": rows})


class Run:
    """Parameters that a test moves, and a trend that reads each checkpoint."""

    def __init__(self, of: Layout) -> None:
        self.trend = Trend(of)
        self.tensors = [[torch.zeros(group.tensors[0].shape)] for group in of.groups]
        self.everything = np.arange(of.partitions)

    def checkpoint(self, step: int, ids: Any = None, *, sealed: bool = False) -> None:
        self.trend.look(self.tensors, step)
        self.trend.saved(self.everything if ids is None else np.asarray(ids), step, sealed=sealed)


class TestTrend:
    def test_the_sample_is_small_whatever_the_size_and_always_the_same(self) -> None:
        of = layout((100_000, 32), (3, 5), (), (70_001,), (0, 4), rows=3)
        first, again = Trend(of), Trend(of)
        assert first.groups == [0, 1, 2, 3]
        for a, b, shape in zip(
            first._index, again._index, [(100_000, 32), (3, 5), (), (70_001,)], strict=True
        ):
            assert torch.equal(a, b)
            assert a.numel() <= VALUES
            assert 0 <= int(a.min()) <= int(a.max()) < np.prod(shape)
        assert first._index[1].tolist() == list(range(15)), "all of what is small"
        assert len(first._ids) == 2 * PARTITIONS + 2
        assert (np.diff(first._ids) > 0).all()

    def test_only_parameters_of_floating_point_are_looked_at(self) -> None:
        of = build_layout(
            [
                ("whole", "parameter", (TensorSpec("", "I64", (4,)),), None),
                ("mean", "buffer", (TensorSpec("", "F32", (4,)),), None),
                ("narrow", "parameter", (TensorSpec("", "F8_E4M3", (4,)),), None),
                ("half", "parameter", (TensorSpec("", "BF16", (4,)), TensorSpec("m", "F32", (4,))), None),
            ]
        )
        trend = Trend(of)
        assert trend.groups == [3]
        trend.look([[torch.zeros(4)]] * 4, 1)
        assert trend.by_group(np.array([2.0])).tolist() == [0, 0, 0, 2]

    def test_it_learns_at_every_look_from_what_was_saved_twice(self) -> None:
        run = Run(layout((8, 4)))
        run.checkpoint(10)
        run.tensors[0][0] += 1
        run.checkpoint(20)
        assert not run.trend.fits.to_array().any(), "no partition was saved twice before"
        run.tensors[0][0] += 0.5
        run.checkpoint(25, [0, 1])
        count, _, dy, dd, _ = run.trend.fits.to_array()[:, 0]
        # Half a gap later the parameter has moved half of the way: the guess is right.
        assert (count, dy, dd) == (1, 1, 1)
        run.tensors[0][0] += 0.5
        run.trend.look(run.tensors, 30)
        # [0, 1] moved 0.5 in 5 iterations, all others 1 in 10.
        assert run.trend.fits.candidate[0] > 0
        assert run.trend.fits.factor[0] > 0

    def test_what_a_seal_found_as_it_was_took_all_that_time(self) -> None:
        run = Run(layout((2, 4)))
        run.checkpoint(10)
        run.tensors[0][0] += 1
        run.checkpoint(20)
        run.checkpoint(30, [0], sealed=True)
        assert run.trend._gap.tolist() == [10, 20]
        assert run.trend._step.tolist() == [30, 30]

    def test_a_jump_is_no_movement(self) -> None:
        run = Run(layout((4, 4)))
        for step in (10, 20):
            run.tensors[0][0] += 1
            run.checkpoint(step)
        run.tensors[0][0][2] = 100
        run.trend.forget(np.array([2]))
        run.trend.look(run.tensors, 30)
        assert not run.trend.fits.to_array().any(), "all others stood still"
        run.tensors[0][0] += 1
        run.checkpoint(30)
        assert run.trend.fits.gain[0] == 0
        assert run.trend._gap.tolist() == [10, 10, 0, 10]

    def test_values_that_are_not_finite_say_nothing_of_the_others(self) -> None:
        run = Run(layout((4, 4)))
        for step in (10, 20, 30, 40):
            run.checkpoint(step)
            run.tensors[0][0] += 1
            run.tensors[0][0][1] = np.nan if step == 20 else np.inf
        assert run.trend.fits.factor[0] > 0.5

    def test_nothing_to_look_at(self) -> None:
        run = Run(layout((0, 4)))
        run.checkpoint(10)
        assert run.trend.fits.to_array().shape == (5, 0)

    def test_fits_go_through_extras_and_movements_do_not(self) -> None:
        run = Run(layout((8, 4)))
        for step in (10, 20, 30, 40):
            run.checkpoint(step)
            run.tensors[0][0] += 1
        again = Run(layout((8, 4)))
        again.trend.continue_from(run.trend.fits.to_array())
        assert again.trend.fits.factor == run.trend.fits.factor > 0
        again.trend.look(run.tensors, 50)
        assert again.trend.fits.factor == run.trend.fits.factor
        again.trend.continue_from(None)
        assert again.trend.fits.factor == 0
