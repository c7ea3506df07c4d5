"""Read the text: Python's own standard library, which is on every machine. Nothing is downloaded."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

WORDS = 20_000
WINDOW = 4
"""Words before and after that belong to a word's context."""
KEPT = 1e-3
"""Only some of the frequent words are kept, as in word2vec: a word of share f with probability sqrt(KEPT / f)."""
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
"""Folders that not every installation has."""


@dataclass(frozen=True, slots=True)
class Words:
    """A text as numbers, the most frequent word is 0."""

    text: NDArray[np.int32]
    """Words in their order, frequent ones thinned out."""
    counts: NDArray[np.int64]
    """How often each word is in the whole text, of shape (words,)."""

    def __str__(self) -> str:
        return (
            f"{self.counts.sum():,} words of Python's standard library, {len(self.counts):,} different ones"
        )


@cache
def load(words: int = WORDS) -> Words:
    """Return the most frequent `words` names and words of the library's sources; fewer where it has fewer."""
    folder = Path(sysconfig.get_path("stdlib"))
    found: list[str] = []
    for path in sorted(folder.rglob("*.py")):
        if not LEFT_OUT & set(path.relative_to(folder).parts):
            found += re.findall(r"[A-Za-z_]\w+", path.read_text(encoding="utf-8", errors="replace"))
    # Equally frequent ones in the order of the alphabet, so that the numbers depend on nothing else.
    ranked = sorted(Counter(found).items(), key=lambda item: (-item[1], item[0]))[:words]
    number = {word: k for k, (word, _) in enumerate(ranked)}
    counts = np.array([count for _, count in ranked])
    text = np.array([number[word] for word in found if word in number], dtype=np.int32)
    kept = np.sqrt(KEPT * len(text) / counts)
    return Words(text[np.random.default_rng(0).random(len(text)) < kept[text]], counts)
