"""Define a quick workload for `scarctl simulate`: gradient descent on a quadratic, as in the paper's figure 3.

scarctl simulate examples.simulate.quadratic:build --interval 16

Rows of the state differ in curvature, so they are still when others move: what checkpoints by priority make use of. A
workload of your own has the same five things: `iterations`, `reset`, `state`, `step` and `metric`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROWS, COLUMNS = 64, 4
RATE = 0.5


class Quadratic:
    """Minimises the sum of curvature times square over 64 rows; row by row, what is lost is lost."""

    iterations = 60
    rows = {"x": 1}  # noqa: RUF012 (one row per partition)

    def reset(self, seed: int) -> None:
        """Start again from a random place."""
        random = np.random.default_rng(seed)
        self._curvature = np.geomspace(0.03, 1.0, ROWS)[:, None]
        self._state: dict[str, NDArray[np.float64]] = {"x": random.normal(size=(ROWS, COLUMNS))}

    def state(self) -> dict[str, NDArray[np.float64]]:
        """Return what `scarctl.attach` would take."""
        return self._state

    def step(self, iteration: int) -> None:
        """Make one step downhill. There are no batches, so the iteration's number does not matter."""
        self._state["x"] -= RATE * self._curvature * self._state["x"]

    def metric(self) -> float:
        """Return the objective."""
        return float(np.sum(self._curvature * self._state["x"] ** 2))


def build() -> Quadratic:
    """Build the workload. With `--data DIR` it would be called with the folder."""
    return Quadratic()
