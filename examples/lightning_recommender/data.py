"""Read sessions for a recommender from Python's own source. A file is a visitor, its names the items in their order."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

HISTORY = 5
"""Items that a recommendation is made from."""
BATCH = 256
SAID_EVERY = 20
"""Batches between two lines of output."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]+")


def visits(items: int, limit: int) -> tuple[TensorDataset, TensorDataset, int]:
    """Training data, held out data, and how many items there are.

    Each is of pairs: what was looked at, int64 of shape (n, 5), and what was looked at next, int64 of shape (n,).
    items: take the most frequent ones. limit: take so many pairs for training; a tenth as many are held out, from
    other files.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [
        _NAME.findall(path.read_text(encoding="utf-8", errors="replace"))
        for path in sorted(library.glob("*.py"))
    ]
    counts = Counter(name for names in files for name in names)
    numbers = {name: number for number, (name, _) in enumerate(counts.most_common(items))}
    training, held_out = ([], [])  # type: tuple[list[torch.Tensor], list[torch.Tensor]]
    for place, names in enumerate(files):
        looked_at = torch.tensor([numbers[name] for name in names if name in numbers])
        if len(looked_at) > HISTORY:
            (held_out if place % 10 == 0 else training).append(looked_at.unfold(0, HISTORY + 1, 1))
    order = torch.Generator().manual_seed(0)
    return _pairs(training, limit, order), _pairs(held_out, limit // 10, order), len(numbers)


def _pairs(windows: list[torch.Tensor], limit: int, order: torch.Generator) -> TensorDataset:
    rows = torch.cat(windows)
    rows = rows[torch.randperm(len(rows), generator=order)[:limit]]
    return TensorDataset(rows[:, :HISTORY].contiguous(), rows[:, HISTORY].contiguous())
