"""Define the model: word2vec's skip-gram with negative sampling, two tables with a row for each word."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from examples.embedding.words import WINDOW, Words

WIDTH = 32
BATCH = 256
"""Pairs of a word and one near it, in an iteration."""
NEGATIVES = 5
"""Words drawn at random for each pair, that are not near it."""
WATCHED = 4096
"""Pairs that the loss is measured on: always the same."""

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.2),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


class SkipGram(nn.Module):
    """Scores of pairs of words: the product of a row of one table and a row of the other."""

    def __init__(self, words: int, *, sparse: bool) -> None:
        super().__init__()
        self.word = nn.Embedding(words, WIDTH, sparse=sparse)
        self.near = nn.Embedding(words, WIDTH, sparse=sparse)
        with torch.no_grad():
            self.word.weight.uniform_(-0.5 / WIDTH, 0.5 / WIDTH)
            self.near.weight.zero_()

    def forward(self, pairs: Pairs) -> torch.Tensor:
        """Mean loss of the pairs, a scalar."""
        words, near, others = pairs
        row = self.word(words).unsqueeze(1)
        right = (row * self.near(near).unsqueeze(1)).sum(2)
        wrong = (row * self.near(others)).sum(2)
        return -(functional.logsigmoid(right).sum() + functional.logsigmoid(-wrong).sum()) / len(words)


Pairs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Words and words near them, int64 of shape (pairs,), and others, of shape (pairs, NEGATIVES)."""


class Batches:
    """Pairs by the number of the iteration: a run that goes back sees again what it saw."""

    def __init__(self, words: Words, seed: int, size: int = BATCH) -> None:
        self._text, self._seed, self._size = words.text, seed, size
        chances = words.counts**0.75
        self._up_to = np.cumsum(chances / chances.sum())
        self.watched = self._draw(np.random.default_rng(0), WATCHED)

    def __getitem__(self, iteration: int) -> Pairs:
        random = np.random.default_rng([self._seed, iteration])
        return self._draw(random, self._size)

    def _draw(self, random: np.random.Generator, count: int) -> Pairs:
        at = random.integers(WINDOW, len(self._text) - WINDOW, count)
        away = random.integers(1, WINDOW + 1, count) * random.choice((-1, 1), count)
        others = np.searchsorted(self._up_to, random.random((count, NEGATIVES)))
        pairs = self._text[at], self._text[at + away], others.clip(max=len(self._up_to) - 1)
        words, near, others = (torch.from_numpy(numbers.astype(np.int64)) for numbers in pairs)
        return words, near, others


def build(words: Words, seed: int, kind: str = "adagrad") -> tuple[SkipGram, torch.optim.Optimizer]:
    """Return a fresh model and its optimizer, one of `OPTIMIZERS`. The same seed gives the same numbers."""
    torch.set_num_threads(1)  # sums in one order are the same everywhere
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, which Adagrad warns of unless it is chosen
    torch.manual_seed(seed)
    model = SkipGram(len(words.counts), sparse=kind != "adam")
    return model, OPTIMIZERS[kind](model.parameters())


def train_step(model: SkipGram, optimizer: torch.optim.Optimizer, pairs: Pairs) -> float:
    """Make one iteration, and return the batch's loss."""
    loss: Any = model(pairs)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@torch.inference_mode()
def evaluate(model: SkipGram, batches: Batches) -> float:
    """Loss of the watched pairs."""
    return float(model(batches.watched))
