"""Train vectors of words, or of users and movies, and save them with scarctl. Kill it, start it again: it continues.

python examples/quickstart/train.py --store run

demo.py divides the vectors among several hosts, and kills one of them.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import re
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed, nn
from torch.nn.functional import logsigmoid

import scarctl

WIDTH = 32
BATCH = 512
WRONG = 64
"""Names in a batch that are not near those of its pairs."""
WATCHED = 1024
"""Pairs that the reported loss is measured on, always the same."""
TEXT_BYTES = 2 << 20
REPORT_EVERY = 5
RATE = 12.0
ROWS = 32
"""Rows of a table that are saved together."""

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Pairs:
    """What is learned: names that occur together. Names are numbers, which ascend with rarity on either side."""

    what: str
    left: Ids
    right: Ids

    @property
    def names(self) -> int:
        """Number of names."""
        return int(self.right.max()) + 1

    def __str__(self) -> str:
        return f"{len(self.left):,} pairs of {self.what}: {self.names:,} names"


def load(folder: Path | None) -> Pairs:
    """Return users and the movies that they have rated, if `folder` has MovieLens.

    Otherwise words and the words near them, of Python's own standard library, which is on every machine.
    """
    path = folder and folder / "movielens-small" / "ratings.csv.gz"
    if path and path.is_file():
        with gzip.open(path, "rt", newline="") as file:
            rows = list(csv.DictReader(file))
        left, right = (_numbered([row[key] for row in rows]) for key in ("userId", "movieId"))
        return Pairs("MovieLens' users and movies", left, right + left.max() + 1)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:TEXT_BYTES].decode(errors="replace")
    words = _numbered(re.findall(r"[A-Za-z_]\w+", text))
    near = np.stack([words[1:-1], words[2:]]) + words.max() + 1
    return Pairs("near words in Python's library", np.repeat(words[:-2], 2), near.T.reshape(-1))


def _numbered(names: list[str]) -> Ids:
    """Return numbers in place of names: 0 is the most frequent one."""
    ranked = {name: number for number, (name, _) in enumerate(Counter(names).most_common())}
    return np.array([ranked[name] for name in names])


def draw(pairs: Pairs, random: np.random.Generator, count: int) -> torch.Tensor:
    """Return a batch: the left names of `count` pairs, their right ones, and WRONG right ones of other pairs."""
    chosen, wrong = random.integers(len(pairs.left), size=count), random.integers(len(pairs.left), size=WRONG)
    return torch.from_numpy(np.concatenate([pairs.left[chosen], pairs.right[chosen], pairs.right[wrong]]))


def batches(pairs: Pairs) -> Iterator[torch.Tensor]:
    """Yield batches without end, always the same."""
    random = np.random.default_rng(0)
    while True:
        yield draw(pairs, random, BATCH)


class Model(nn.Module):
    """A vector for each name. A rank has those whose number divided by the number of ranks leaves the rank."""

    def __init__(self, names: int, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.vectors = nn.Embedding(-(-names // ranks), WIDTH, sparse=True)
        nn.init.normal_(self.vectors.weight, std=0.3, generator=torch.Generator().manual_seed(rank))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch: pairs are to have large products, others small ones."""
        count = (len(batch) - WRONG) // 2
        left, right, wrong = self.look_up(batch).split([count, count, WRONG])
        return -logsigmoid((left * right).sum(1)).mean() - logsigmoid(-left @ wrong.T).mean()

    def look_up(self, names: torch.Tensor) -> torch.Tensor:
        """Return the vectors of all these names, on every rank, of shape (names, WIDTH)."""
        (mine,) = torch.where(names % self.ranks == self.rank)
        own = torch.zeros(len(names), WIDTH).index_copy(0, mine, self.vectors(names[mine] // self.ranks))
        everyones = own.detach().clone()
        if self.ranks > 1:
            distributed.all_reduce(everyones)
        # The values are everyone's, the gradient is that of the own rows.
        return own + (everyones - own.detach())


def train(
    pairs: Pairs,
    iterations: int,
    say: Callable[[int, float | scarctl.Resumed], None],
    *,
    rank: int = 0,
    ranks: int = 1,
    seconds: float = 0.0,
    full_every: int = 0,
    mode: Literal["auto", "partial", "rollback"] = "auto",
    **options: Any,
) -> None:
    """Train, or continue, until so many iterations are done.

    say: is called with an iteration, and its loss or what was resumed. seconds: of an iteration, at least. full_every:
    iterations between two full checkpoints; 0: scarctl decides what it saves when. options: of `scarctl.attach`.
    """
    torch.set_num_threads(1)
    model = Model(pairs.names, rank, ranks)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=RATE
    )  # as word2vec does, which divides no gradient by BATCH
    watched = draw(pairs, np.random.default_rng(1), WATCHED)
    parts = scarctl.Partitioning(shards=8 if ranks == 1 else None, rows={"*": ROWS})

    with scarctl.attach(model, optimizer, partitioning=parts, **options) as session:
        resumed = session.resume(mode=mode)
        say(resumed.step, resumed)
        stream = iter(session.batches(batches(pairs)))
        while session.head_step < iterations:
            began = time.monotonic()
            loss = model(next(stream))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if full_every and session.head_step % full_every == 0:
                session.checkpoint(full=True)
            if session.head_step % REPORT_EVERY == 0:
                with torch.no_grad():
                    say(session.head_step, float(model(watched)))
            time.sleep(max(0.0, began + seconds - time.monotonic()))


def main() -> None:
    """Train in this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", type=Path, required=True, help="folder for the checkpoints")
    parser.add_argument("--iterations", type=int, default=240)
    parser.add_argument("--data", type=Path, help="folder with movielens-small (default: words)")
    arguments = parser.parse_args()

    def say(step: int, what: float | scarctl.Resumed) -> None:
        if isinstance(what, scarctl.Resumed):
            print(what, flush=True)
        elif step % 20 == 0:
            print(f"iteration {step}: loss {what:.3f}", flush=True)

    train(load(arguments.data), arguments.iterations, say, store=arguments.store)


if __name__ == "__main__":
    main()
