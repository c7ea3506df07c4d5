"""Train latent Dirichlet allocation on Reuters by collapsed Gibbs sampling: 20 topics, α = β = 1.

scarctl simulate examples.paper.lda:build --data DIR

A document's topics are a partition. Counts of topics by document and by word follow from the topics of the tokens, so
those are what is saved. The paper's norm is the total variation between a document's old and new distribution over
topics, times its length: half the sum of how far the counts differ.
"""

from __future__ import annotations

from collections.abc import Mapping

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from examples.paper.data import reuters

TOPICS = 20
ALPHA = BETA = 1.0


def scaled_variation(live: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Total variation between the distributions of every document, times its length."""
    return 0.5 * (_counts(live[""]) - _counts(saved[""])).abs().sum(dim=1)


def _counts(topics: torch.Tensor) -> torch.Tensor:
    """Tokens of every topic: (documents, topics). A short document is filled up with -1, which counts as no topic."""
    ones = torch.ones_like(topics, dtype=torch.float64)
    counts = torch.zeros(len(topics), TOPICS + 1, dtype=torch.float64)
    return counts.scatter_add_(1, topics.to(torch.int64) + 1, ones)[:, 1:]


class TopicModel:
    """Topics of all tokens: a row for each document, as long as the longest one."""

    iterations = 12  # later, chance moves the likelihood by more than many iterations do
    rows = {"topics": 1}  # noqa: RUF012
    norm = staticmethod(scaled_variation)

    def __init__(self, folder: str) -> None:
        self._starts, self._tokens, self._words = reuters(folder)

    def reset(self, seed: int) -> None:
        """Start with a random topic for every token."""
        self._seed = seed
        lengths = np.diff(self._starts)
        topics = np.random.default_rng(seed).integers(
            0, TOPICS, (len(lengths), lengths.max()), dtype=np.int16
        )
        topics[np.arange(lengths.max()) >= lengths[:, None]] = -1
        self._state = {"topics": topics}
        self.recompute()

    def state(self) -> dict[str, NDArray[np.int16]]:
        """Topics; -1 where a document is shorter."""
        return self._state

    def recompute(self) -> None:
        """Make the counts again, which follow from the topics."""
        documents = len(self._starts) - 1
        self._by_document = np.zeros((documents, TOPICS), dtype=np.int64)
        self._by_word = np.zeros((self._words, TOPICS), dtype=np.int64)
        _count(self._starts, self._tokens, self._state["topics"], self._by_document, self._by_word)

    def step(self, iteration: int) -> None:
        """Draw the topic of every token once. Random numbers follow from the iteration's number."""
        chance = np.random.default_rng([self._seed, iteration]).random(len(self._tokens))
        _sweep(
            self._starts, self._tokens, self._state["topics"], self._by_document, self._by_word,
            self._by_word.sum(axis=0), chance,
        )  # fmt: skip

    def metric(self) -> float:
        """Negative log-likelihood of the words, by the distributions that the counts stand for."""
        return float(_likelihood(self._starts, self._tokens, self._by_document, self._by_word))


@numba.njit(cache=True)  # type: ignore[misc]
def _count(starts, tokens, topics, by_document, by_word):  # type: ignore[no-untyped-def]
    for document in range(len(starts) - 1):
        for k in range(starts[document + 1] - starts[document]):
            topic = topics[document, k]
            by_document[document, topic] += 1
            by_word[tokens[starts[document] + k], topic] += 1


@numba.njit(cache=True)  # type: ignore[misc]
def _sweep(starts, tokens, topics, by_document, by_word, totals, chance):  # type: ignore[no-untyped-def]
    words, weights = len(by_word), np.empty(TOPICS)
    for document in range(len(starts) - 1):
        for k in range(starts[document + 1] - starts[document]):
            at = starts[document] + k
            word, topic = tokens[at], topics[document, k]
            by_document[document, topic] -= 1
            by_word[word, topic] -= 1
            totals[topic] -= 1
            total = 0.0
            for t in range(TOPICS):
                weight = (
                    (by_document[document, t] + ALPHA)
                    * (by_word[word, t] + BETA)
                    / (totals[t] + BETA * words)
                )
                total += weight
                weights[t] = total
            topic, mark = 0, chance[at] * total
            while topic < TOPICS - 1 and weights[topic] < mark:
                topic += 1
            topics[document, k] = topic
            by_document[document, topic] += 1
            by_word[word, topic] += 1
            totals[topic] += 1


@numba.njit(cache=True)  # type: ignore[misc]
def _likelihood(starts, tokens, by_document, by_word):  # type: ignore[no-untyped-def]
    words, totals, result = len(by_word), np.empty(TOPICS), 0.0
    for t in range(TOPICS):
        totals[t] = by_word[:, t].sum() + BETA * words
    for document in range(len(starts) - 1):
        length = starts[document + 1] - starts[document]
        for at in range(starts[document], starts[document + 1]):
            chance = 0.0
            for t in range(TOPICS):
                chance += (by_document[document, t] + ALPHA) * (by_word[tokens[at], t] + BETA) / totals[t]
            result -= np.log(chance / (length + TOPICS * ALPHA))
    return result


def build(folder: str = "../shared/data") -> TopicModel:
    """Build the workload."""
    return TopicModel(folder)
