"""Train multinomial logistic regression on MNIST as the paper does: gradient descent by batches of 10,000.

scarctl simulate examples.paper.mlr:build --data DIR
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from examples.paper.data import mnist

BATCH, CLASSES = 10_000, 10
RATE = 1e-5
CRITERION = 2.5e4
"""Cross-entropy, summed over all images, at which a run ends."""
WATCHED = slice(20_000, 30_000)
"""Images that the metric looks at, and counts six times: all would take longer than training. These are as hard."""


class LogisticRegression:
    """A row of the matrix for each pixel is a partition. It starts at 0, on pixels from 0 to 255."""

    iterations = 150
    target = CRITERION
    rows = {"w": 1}  # noqa: RUF012

    def __init__(self, folder: str) -> None:
        self._images, labels = mnist(folder)
        self._labels = np.eye(CLASSES, dtype=np.float32)[labels]

    def reset(self, seed: int) -> None:
        """Start at 0. The seed decides which images are a batch."""
        self._order = np.random.default_rng(seed).permutation(len(self._images) // BATCH)
        self._state = {"w": np.zeros((self._images.shape[1], CLASSES), dtype=np.float32)}

    def state(self) -> dict[str, NDArray[np.float32]]:
        """Return the matrix."""
        return self._state

    def step(self, iteration: int) -> None:
        """Down the mean gradient over one batch."""
        first = int(self._order[iteration % len(self._order)]) * BATCH
        images, labels = self._images[first : first + BATCH], self._labels[first : first + BATCH]
        scores = images @ self._state["w"]
        scores -= scores.max(axis=1, keepdims=True)
        chances = np.exp(scores, out=scores)
        chances /= chances.sum(axis=1, keepdims=True)
        self._state["w"] -= np.float32(RATE / BATCH) * (images.T @ (chances - labels))

    def metric(self) -> float:
        """Cross-entropy over all images, estimated."""
        labels = self._labels[WATCHED]
        scores = self._images[WATCHED] @ self._state["w"]
        scores -= scores.max(axis=1, keepdims=True)
        right = np.einsum("ij,ij->i", scores, labels)
        return (
            len(self._images)
            / len(labels)
            * float(np.sum(np.log(np.exp(scores).sum(axis=1)) - right, dtype=np.float64))
        )


def build(folder: str = "../shared/data") -> LogisticRegression:
    """Build the workload."""
    return LogisticRegression(folder)
