"""Test which copies a partial checkpoint encodes, the order of partitions, and the cost of each."""

from __future__ import annotations

import numpy as np
import pytest

from scarctl.arena.arena import Arena
from scarctl.checkpoint.encoded import EncodedCopies
from scarctl.config import Norm
from scarctl.state.encodings import Encoding
from scarctl.state.layout import TensorSpec, build_layout

ROWS, WIDTH = 6, 16


def copies(encoding: Encoding, norm: Norm = "l2", errors: list[float] | None = None) -> EncodedCopies:
    """Return copies of six rows of float32, one partition each; errors: of the store's copies, -1 if exact."""
    layout = build_layout([("w", "parameter", (TensorSpec("", "F32", (ROWS, WIDTH)),))], rows={"w": 1})
    arena = Arena.anonymous(layout)
    arena.encoding_error[:] = -1.0 if errors is None else errors
    return EncodedCopies(arena, encoding, norm)


def test_exact_sessions_weigh_as_if_there_were_no_encoding() -> None:
    distance = np.arange(6.0)
    weighed = copies("exact").weigh(distance)
    assert weighed.exact is None
    assert weighed.distance_sq.tolist() == (distance**2).tolist()
    assert weighed.nbytes.tolist() == [4 * WIDTH] * ROWS


def test_an_error_counts_as_distance_until_it_is_all_there_is() -> None:
    found = copies("int8", errors=[-1, -1, 4.0, 4.0, 4.0, 0.0])
    weighed = found.weigh(np.array([0.0, 3.0, 0.0, 2.0, 3.0, 0.0]))
    assert weighed.distance_sq[:5].tolist() == [0, 9, 4, 8, 13]
    assert 0 < weighed.distance_sq[5] < 1e-200, "its slots may still differ: it comes last"
    assert weighed.exact is not None
    assert weighed.exact.tolist() == [False, False, True, True, False, True]
    assert weighed.nbytes.tolist() == [WIDTH + 4] * 2 + [4 * WIDTH] * 2 + [WIDTH + 4, 4 * WIDTH]


def test_values_that_are_not_finite_stay_so_and_infinite_errors_come_first() -> None:
    weighed = copies("int8", errors=[np.inf, 1.0, -1, -1, -1, -1]).weigh(
        np.array([1, np.nan, 2, 3, 4, np.inf])
    )
    assert np.isfinite(weighed.distance_sq).tolist() == [True, False, True, True, True, False]
    assert weighed.distance_sq[0] > 1e200
    assert weighed.exact is not None
    assert weighed.exact.tolist() == [True] + [False] * 5


@pytest.mark.parametrize(("norm", "error"), [("rms", 16.0 / WIDTH), ("relative", 0.0), ("l2", 16.0)])
def test_errors_are_in_the_sessions_norm(norm: Norm, error: float) -> None:
    weighed = copies("bfloat16", norm, [16.0] * ROWS).weigh(np.full(ROWS, 10.0))
    assert weighed.distance_sq == pytest.approx(np.full(ROWS, 100 + error))


def test_a_later_exact_session_replaces_what_is_encoded() -> None:
    weighed = copies("exact", errors=[1.0, -1, -1, -1, -1, -1]).weigh(np.zeros(ROWS))
    assert np.flatnonzero(weighed.distance_sq).tolist() == [0]
    assert weighed.nbytes.tolist() == [4 * WIDTH] * ROWS
