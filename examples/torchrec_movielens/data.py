"""Load MovieLens' small data set: who rated which movie how, and the movies' genres."""

from __future__ import annotations

import csv
import gzip
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


@dataclass(frozen=True, slots=True)
class Ratings:
    """Ratings in a random order that is always the same."""

    users: torch.Tensor
    """Numbers from 0 on: int64 of shape (ratings,)."""
    movies: torch.Tensor
    stars: torch.Tensor
    """0.5 to 5, less their mean: float32 of shape (ratings,)."""
    genres: tuple[tuple[int, ...], ...]
    """The genres of each movie."""

    @property
    def counts(self) -> dict[str, int]:
        """How many users, movies and genres there are."""
        genres = 1 + max(max(of_one) for of_one in self.genres)
        return {"user": int(self.users.max()) + 1, "movie": len(self.genres), "genre": genres}

    def batch(self, step: int, rank: int, size: int) -> tuple[KeyedJaggedTensor, torch.Tensor]:
        """Return the ratings of a step, the same ones in every run: features, and stars of shape (size,)."""
        generator = torch.Generator().manual_seed(step * 1000 + rank)
        rows = torch.randint(len(self.stars), (size,), generator=generator)
        movies = self.movies[rows].tolist()
        genres = [genre for movie in movies for genre in self.genres[movie]]
        ones = torch.ones(2 * size, dtype=torch.int64)
        features = KeyedJaggedTensor(
            keys=["user", "movie", "genre"],
            values=torch.cat([self.users[rows], self.movies[rows], torch.tensor(genres)]),
            lengths=torch.cat([ones, torch.tensor([len(self.genres[movie]) for movie in movies])]),
        )
        return features, self.stars[rows]


def load(folder: Path) -> Ratings:
    """Read `movies.csv` and `ratings.csv`, or `ratings.csv.gz`, of https://grouplens.org/datasets/movielens."""
    packed, plain = folder / "ratings.csv.gz", folder / "ratings.csv"
    if not packed.exists() and not plain.exists():
        sys.exit(
            f"no MovieLens data in {folder}: name the folder that has movies.csv and ratings.csv with --data"
        )
    with (folder / "movies.csv").open(encoding="utf-8", newline="") as file:
        movies = {row["movieId"]: row["genres"].split("|") for row in csv.DictReader(file)}
    numbers = {movie: number for number, movie in enumerate(movies)}
    names = sorted({genre for genres in movies.values() for genre in genres})
    text = gzip.decompress(packed.read_bytes()) if packed.exists() else plain.read_bytes()
    rows = [
        (int(row["userId"]) - 1, numbers[row["movieId"]], float(row["rating"]))
        for row in csv.DictReader(text.decode().splitlines())
    ]
    users, rated, stars = (torch.tensor(column) for column in zip(*rows, strict=True))
    genres = tuple(tuple(names.index(genre) for genre in of_one) for of_one in movies.values())
    return Ratings(users, rated, stars - stars.mean(), genres)
