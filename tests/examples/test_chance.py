"""Test that weighting failures by p gives the same result as drawing them with p."""

from __future__ import annotations

from typing import Any

import numpy as np

from examples.paper.chance import reduction, weights

LAST = 60


def results(after: list[int]) -> list[dict[str, Any]]:
    """Return failures whose rework grows with the iteration: a rollback's 4 times as fast as priority's, and by 10."""
    return [{"failed_after": k, "undisturbed": LAST + 1, "rework": [10 + 4 * k, 0, k]} for k in after]


def test_weights_are_those_of_the_geometric_distribution() -> None:
    every = results(list(range(1, LAST + 1)))
    weight = weights(every, 0.05)
    assert np.isclose(weight.mean(), 1)
    np.testing.assert_allclose(weight[1:] / weight[:-1], 0.95)
    chance = weight / weight.sum()
    after = np.arange(1, LAST + 1)
    found = reduction(every, weight)
    assert found is not None
    assert np.isclose(found.mean, 1 - chance @ after / (chance @ (10 + 4 * after)))
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.mean < found.high
