"""Read the paper's data sets from the folders that a user has. Nothing is downloaded."""

from __future__ import annotations

import csv
import gzip
import struct
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import UsageError

IMAGES = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz")


@cache
def mnist(folder: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Training images of shape (images, 784) with values from 0 to 255, and their labels."""
    images, labels = (_idx(_find(folder, "mnist", name)) for name in IMAGES)
    return images.reshape(len(images), -1).astype(np.float32), labels.astype(np.int64)


def movielens(folder: str) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64], int, int]:
    """Row and column of every rating, the ratings, and how many users and rated movies there are."""
    with gzip.open(_find(folder, "movielens-small", "ratings.csv.gz"), "rt", newline="") as file:
        lines = [
            (int(line["userId"]), int(line["movieId"]), float(line["rating"]))
            for line in csv.DictReader(file)
        ]
    users, movies, ratings = zip(*lines, strict=True)
    names, rows = np.unique(users, return_inverse=True)
    titles, columns = np.unique(movies, return_inverse=True)
    return rows, columns, np.array(ratings), len(names), len(titles)


def reuters(folder: str) -> tuple[NDArray[np.int64], NDArray[np.int32], int]:
    """Return where each document begins (and the last ends), the word of every token, and how many words there are."""
    starts, tokens = [0], []
    for line in _find(folder, "reuters-395", "reuters.ldac").read_text().splitlines():
        for pair in line.split()[1:]:
            word, count = map(int, pair.split(":"))
            tokens += [word] * count
        starts.append(len(tokens))
    words = len(_find(folder, "reuters-395", "reuters.tokens").read_text().splitlines())
    return np.array(starts), np.array(tokens, dtype=np.int32), words


def _find(folder: str, name: str, file: str) -> Path:
    """Return the path of `file` in the folder `name` of the data folder, or in the data folder itself."""
    for place in (Path(folder, name), Path(folder)):
        if (place / file).is_file():
            return place / file
    raise UsageError(
        f"there is no {name}/{file} in {folder}",
        hint="--data names the folder that has the folders of the data sets",
    )


def _idx(path: Path) -> NDArray[np.uint8]:
    """Return the array in a gzipped IDX file of unsigned bytes."""
    with gzip.open(path) as file:
        (dimensions,) = struct.unpack(">xxxB", file.read(4))
        shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
        return np.frombuffer(file.read(), dtype=np.uint8).reshape(shape)
