"""Train latent Dirichlet allocation that draws the topics of lost documents again, from the counts of all.

scarctl simulate examples.paper.lda_resampled:build --data DIR

One pass over what was lost. With a half that is half an iteration's work, which rework does not count.
"""

from __future__ import annotations

import numpy as np

from examples.paper.lda import TopicModel, _sweep


class Resampled(TopicModel):
    """Documents that were lost are known by having changed."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self._position = {"done": 0}
        self.extras = {"position": self._position}

    def reset(self, seed: int) -> None:
        """Start with a random topic for every token."""
        self._failed, self._done = True, -1  # the base class counts by `recompute`
        super().reset(seed)
        self._failed, self._position["done"] = False, 0

    def step(self, iteration: int) -> None:
        """Draw the topic of every token once."""
        super().step(iteration)
        self._position["done"] = iteration
        if not self._failed:
            self._done, self._before = iteration, self._state["topics"].copy()

    def recompute(self) -> None:
        """Make the counts again, and after a partial recovery draw the topics of lost documents once."""
        super().recompute()
        self._failed = True  # the rest continues from here, once for every way
        if self._position["done"] != self._done:
            return
        lost = np.flatnonzero((self._state["topics"] != self._before).any(axis=1))
        if not lost.size:
            return
        starts = np.concatenate(([0], np.cumsum(np.diff(self._starts)[lost])))
        tokens = np.concatenate([self._tokens[self._starts[d] : self._starts[d + 1]] for d in lost])
        topics, by_document = self._state["topics"][lost], self._by_document[lost]
        chance = np.random.default_rng([self._seed, self._done, 1]).random(len(tokens))
        _sweep(starts, tokens, topics, by_document, self._by_word, self._by_word.sum(axis=0), chance)
        self._state["topics"][lost], self._by_document[lost] = topics, by_document


def build(folder: str = "../shared/data") -> Resampled:
    """Build the workload."""
    return Resampled(folder)
