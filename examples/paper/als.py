"""Factorise MovieLens by alternating least squares: 20 factors, ratings = L R.

scarctl simulate examples.paper.als:build --data DIR

One iteration finds L for R and then R for that L. So after an iteration R follows from L alone, and L matters to
nothing that comes: `build_only_r` saves R, as L is found again anyway; `build_only_l` saves L, which is 14 times
smaller, and finds R again.
"""

from __future__ import annotations

from collections.abc import Mapping

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from examples.paper.data import movielens
from scarctl.checkpoint.distance import Norm

FACTORS = 20
PENALTY = 0.1
"""Penalty of the squared factors. The paper names none, but most movies have fewer ratings than factors."""

Floats = NDArray[np.float64]


class Factorisation:
    """A row of L (a user), a column of R (a movie): a partition each. R is kept transposed."""

    iterations = 60
    norm: Norm = "l2"

    def __init__(self, folder: str, saved: tuple[str, ...]) -> None:
        rows, columns, ratings, users, movies = movielens(folder)
        self._by_user = _Sparse(rows, columns, ratings, users)
        self._by_movie = _Sparse(columns, rows, ratings, movies)
        self._saved = saved
        self.rows = dict.fromkeys(saved, 1)

    def reset(self, seed: int) -> None:
        """Start with every factor from 0 to 1."""
        random = np.random.default_rng(seed)
        self._factors = {
            "L": random.uniform(size=(self._by_user.count, FACTORS)),
            "R": random.uniform(size=(self._by_movie.count, FACTORS)),
        }

    def curvature(self, live: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a distance that weights a row by its ratings: the curvature is a sum over them. It takes all rows."""
        side = self._by_user if len(live[""]) == self._by_user.count else self._by_movie
        return (live[""] - saved[""]).norm(dim=1) * side.ratings_by_row.sqrt()

    def state(self) -> dict[str, Floats]:
        """Return the saved state."""
        return {name: self._factors[name] for name in self._saved}

    def step(self, iteration: int) -> None:
        """Make one iteration. It needs only R."""
        self._by_user.solve(self._factors["R"], self._factors["L"])
        self._by_movie.solve(self._factors["L"], self._factors["R"])

    def recompute(self) -> None:
        """After a recovery: what is not saved follows from what is."""
        if self._saved == ("L",):
            self._by_movie.solve(self._factors["L"], self._factors["R"])

    def metric(self) -> float:
        """Return the objective: squared errors of the known ratings, and the penalty."""
        squares = sum(float(np.vdot(factors, factors)) for factors in self._factors.values())
        return self._by_user.error(self._factors["L"], self._factors["R"]) + PENALTY * squares


class _Sparse:
    """Ratings by the rows of one side."""

    def __init__(
        self, rows: NDArray[np.int64], columns: NDArray[np.int64], ratings: Floats, count: int
    ) -> None:
        order = np.argsort(rows, kind="stable")
        self.count = count
        self._starts = np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=count))))
        self._columns, self._ratings = columns[order], ratings[order]
        self.ratings_by_row = torch.from_numpy(np.diff(self._starts).astype(np.float64))

    def solve(self, given: Floats, found: Floats) -> None:
        _solve(self._starts, self._columns, self._ratings, given, found)

    def error(self, mine: Floats, other: Floats) -> float:
        return float(_error(self._starts, self._columns, self._ratings, mine, other))


@numba.njit(cache=True, fastmath=True)  # type: ignore[misc]
def _cholesky(matrix: Floats, right: Floats, size: int) -> None:
    """Solve (matrix + penalty) x = right in place, of which only the lower triangle is read."""
    for j in range(size):
        matrix[j, j] += PENALTY
        for m in range(j):
            matrix[j, j] -= matrix[j, m] * matrix[j, m]
        matrix[j, j] = np.sqrt(matrix[j, j])
        for i in range(j + 1, size):
            for m in range(j):
                matrix[i, j] -= matrix[i, m] * matrix[j, m]
            matrix[i, j] /= matrix[j, j]
    for i in range(size):
        for m in range(i):
            right[i] -= matrix[i, m] * right[m]
        right[i] /= matrix[i, i]
    for i in range(size - 1, -1, -1):
        for m in range(i + 1, size):
            right[i] -= matrix[m, i] * right[m]
        right[i] /= matrix[i, i]


@numba.njit(cache=True, fastmath=True)  # type: ignore[misc]
def _solve(
    starts: NDArray[np.int64], columns: NDArray[np.int64], ratings: Floats, given: Floats, found: Floats
) -> None:
    """Ridge regression for every row of `found`; with fewer ratings than factors in its dual form, which is smaller."""
    block = np.empty((np.diff(starts).max(), FACTORS))
    matrix, right = np.empty((FACTORS, FACTORS)), np.empty(FACTORS)
    for row in range(len(starts) - 1):
        first, count = starts[row], starts[row + 1] - starts[row]
        for k in range(count):
            block[k] = given[columns[first + k]]
        x, y = block[:count], ratings[first : first + count]
        if count < FACTORS:
            matrix[:count, :count] = np.dot(x, x.T)
            right[:count] = y
            _cholesky(matrix, right, count)
            found[row] = np.dot(x.T, right[:count])
        else:
            matrix[:] = np.dot(x.T, x)
            right[:] = np.dot(x.T, y)
            _cholesky(matrix, right, FACTORS)
            found[row] = right


@numba.njit(cache=True, fastmath=True)  # type: ignore[misc]
def _error(
    starts: NDArray[np.int64], columns: NDArray[np.int64], ratings: Floats, mine: Floats, other: Floats
) -> float:
    total = 0.0
    for row in range(len(starts) - 1):
        for at in range(starts[row], starts[row + 1]):
            guess = 0.0
            for i in range(mine.shape[1]):
                guess += mine[row, i] * other[columns[at], i]
            total += (ratings[at] - guess) ** 2
    return total


def build(folder: str = "../shared/data") -> Factorisation:
    """Both factors are saved, as in the paper."""
    return Factorisation(folder, ("L", "R"))


def build_curved(folder: str = "../shared/data") -> Factorisation:
    """Both are saved, with priority by curvature."""
    found = build(folder)
    found.norm = found.curvature
    return found


def build_only_r(folder: str = "../shared/data") -> Factorisation:
    """R is saved: the next iteration finds L from it."""
    return Factorisation(folder, ("R",))


def build_only_l(folder: str = "../shared/data") -> Factorisation:
    """L is saved: R is found again from it."""
    return Factorisation(folder, ("L",))
