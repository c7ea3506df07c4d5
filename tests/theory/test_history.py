"""Test what a run's history keeps, and what a session samples of its parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from scarctl.checkpoint.motion import VALUES, Motion
from scarctl.state.layout import Layout, TensorSpec, build_layout
from scarctl.theory.convergence import Convergence, NoEstimate
from scarctl.theory.history import MOST, History


def walked(c: float, steps: int, gap: int = 1, x0: float = 1.0) -> History:
    """Return the history of a run that moves straight at the rate c."""
    history, at = History(), 0
    while at + gap <= steps:
        gap = max(gap, history.least_gap)
        history.add(at, gap, x0 * (c**at - c ** (at + gap)))
        at += gap
    return history


@pytest.mark.parametrize("steps", [40, 20_000])
def test_a_long_run_is_covered_by_few_points(steps: int) -> None:
    c = 1 - 3 / steps
    history = walked(c, steps)
    assert MOST // 2 <= max(len(history.points), MOST // 2) <= MOST
    starts = [step for step, _, _ in history.points]
    assert starts[0] < steps / 3
    assert starts[-1] > steps / 2
    found = history.convergence(steps)
    assert isinstance(found, Convergence)
    assert found.c == pytest.approx(c, rel=1e-4)
    assert found.x0_distance == pytest.approx(c**steps, rel=1e-2)


def test_what_came_later_is_forgotten() -> None:
    history = walked(0.99, 50, gap=5).until(32)
    assert history.points[-1][:2] == (25, 5)
    assert history.least_gap == 5


def test_there_is_nothing_to_tell_in_the_beginning_and_long_after() -> None:
    for history, step in ((History(), 100), (walked(0.9, 5), 5), (walked(0.9, 40), 1000)):
        assert isinstance(history.convergence(step), NoEstimate)


def test_parts_add_up_where_all_have_been_looked_at() -> None:
    first, second = walked(0.95, 60, x0=3.0), walked(0.95, 60, x0=4.0)
    second = History(point for point in second.points if point[0] != 7)
    joined = History.joined([first, second])
    assert [point[0] for point in joined.points] == [*range(7), *range(8, 60)]
    found = joined.convergence(60)
    assert isinstance(found, Convergence)
    assert found.x0_distance == pytest.approx(5.0 * 0.95**60, rel=1e-3)


def test_it_comes_back_from_its_array() -> None:
    history = walked(0.97, 90)
    again = History.from_array(history.to_array())
    assert again.points == history.points
    assert History.from_array(History().to_array()).points == ()


@pytest.mark.parametrize(
    "foreign",
    [
        None,
        "text",
        {"a": 1},
        [[1, 1, 1.0]],
        np.ones((1, 3), dtype=complex),
        np.array([[1, 2]], dtype=np.float64),
        np.array([[1, 0, 1.0]], dtype=np.float64),
        np.array([[1, 1, -1.0]], dtype=np.float64),
        np.array([[1, 1, float("nan")]], dtype=np.float64),
        np.array([[5, 1, 1.0], [5, 1, 1.0]], dtype=np.float64),
        np.array([[5, 3, 1.0], [7, 1, 1.0]], dtype=np.float64),
        np.array([[1e300, 1, 1.0]], dtype=np.float64),
        np.ones((MOST + 1, 3)),
        np.ones((2, 2, 3)),
        np.array([[-1, 1, 1.0]], dtype=np.float64),
    ],
)
def test_what_is_no_history_has_no_points(foreign: Any) -> None:
    assert History.from_array(np.array([[1.0, 1.0, 1.0]])).points == ((1, 1, 1.0),)
    assert History.from_array(foreign).points == ()


# -- the sample --------------------------------------------------------------------------------------------------


def layout_of(**tensors: torch.Tensor) -> Layout:
    names = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.int64: "I64"}
    return build_layout(
        [
            (
                name,
                "buffer" if name == "buffer" else "parameter",
                (TensorSpec("", names[t.dtype], tuple(t.shape)),),
            )
            for name, t in tensors.items()
        ]
    )


def test_a_small_state_is_measured_exactly() -> None:
    state = {
        "w": torch.zeros(10, 4),
        "fine": torch.zeros(3, dtype=torch.float64),
        "scalar": torch.tensor(0.0),
        "counts": torch.zeros(5, dtype=torch.int64),
        "buffer": torch.zeros(5),
    }
    motion = Motion(layout_of(**state))
    live = [[tensor] for tensor in state.values()]
    motion.look(live, 10)
    state["w"] += 0.5
    state["fine"] += 1e-12
    state["scalar"].fill_(3.0)
    state["counts"] += 100
    state["buffer"] += 100
    motion.look(live, 20)
    motion.look(live, 20)
    state["w"].fill_(0.5)  # no more motion
    motion.look(live, 30)
    assert motion.history.points == ((10, 10, pytest.approx(np.sqrt(40 * 0.25 + 9 + 3e-24))), (20, 10, 0.0))


@pytest.mark.parametrize(("dtype", "strided"), [(torch.float32, True), (torch.bfloat16, False)])
def test_a_large_state_is_sampled(dtype: torch.dtype, strided: bool) -> None:
    large = torch.zeros(700, 900, dtype=dtype)
    small = torch.zeros(100)
    live = [[large.t() if strided else large], [small]]
    motion = Motion(layout_of(large=live[0][0], small=small))
    motion.look(live, 1)
    generator = torch.Generator().manual_seed(0)
    large += torch.randn(700, 900, generator=generator)
    small += 1.0
    motion.look(live, 2)
    true = float(torch.hypot(large.double().norm(), small.double().norm()))
    assert large.numel() > 2 * VALUES
    assert motion.history.points[0][2] == pytest.approx(true, rel=0.02)


def test_jumps_are_no_motion() -> None:
    w = torch.zeros(8)
    motion = Motion(layout_of(w=w))
    for step in (1, 2):
        motion.look([[w]], step)
    w.fill_(float("inf"))
    motion.look([[w]], 3)
    motion.look([[w]], 4)
    motion.forget()
    w.fill_(9.0)
    motion.look([[w]], 5)
    motion.look([[w]], 6)
    assert [point[:2] for point in motion.history.points] == [(1, 1), (5, 1)]
    motion.continue_from(motion.history.until(3))
    motion.look([[w]], 4)
    assert [point[:2] for point in motion.history.points] == [(1, 1)]


def test_a_state_without_numbers_that_move_has_no_history() -> None:
    counts = torch.zeros(5, dtype=torch.int64)
    motion = Motion(layout_of(counts=counts))
    for step in range(1, 20):
        motion.look([[counts]], step)
    assert motion.history.points == ()
