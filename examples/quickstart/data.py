"""Load real images: scikit-learn's bundled digits, or MNIST and Fashion-MNIST from their IDX files."""

from __future__ import annotations

import gzip
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

FILES = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz")
"""The names under which MNIST and Fashion-MNIST are published."""

_UINT8 = 8
"""IDX's code for unsigned bytes, the only type that these data sets use."""


@dataclass(frozen=True, slots=True)
class Images:
    """A training set."""

    name: str
    pixels: torch.Tensor
    """float32 of shape (images, 1, side, side), from 0 to 1."""
    labels: torch.Tensor
    """int64 of shape (images,), from 0 to 9."""

    @property
    def side(self) -> int:
        """Width and height of an image in pixels."""
        return int(self.pixels.shape[-1])

    def __len__(self) -> int:
        return len(self.labels)

    def __str__(self) -> str:
        return f"{self.name}: {len(self):,} images of {self.side}x{self.side} pixels"


def load(folder: Path | None, limit: int | None = None) -> Images:
    """Return the digits that scikit-learn brings along, or the training set in `folder`.

    limit: take this many images, the first ones, which are mixed in all three sets. Exits with a message when there is
    nothing to read.
    """
    images = _digits() if folder is None else _idx_folder(folder)
    return Images(images.name, images.pixels[:limit], images.labels[:limit])


def _digits() -> Images:
    # 1,797 scans of handwritten digits; they come with the package, nothing is downloaded.
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels = torch.from_numpy(found.images.astype(np.float32) / 16).unsqueeze(1)
    return Images("digits", pixels, torch.from_numpy(found.target.astype(np.int64)))


def _idx_folder(folder: Path) -> Images:
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        sys.exit(f"{folder} is not MNIST or Fashion-MNIST: there is no {' and no '.join(missing)} in it")
    pixels, labels = (read_idx(folder / name) for name in FILES)
    if (
        pixels.ndim != 3
        or labels.ndim != 1
        or len(pixels) != len(labels)
        or pixels.shape[1] != pixels.shape[2]
    ):
        sys.exit(f"{folder}: images of shape {pixels.shape} and labels of shape {labels.shape} do not fit")
    scaled = torch.from_numpy(pixels.astype(np.float32) / 255).unsqueeze(1)
    return Images(folder.resolve().name, scaled, torch.from_numpy(labels.astype(np.int64)))


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Return the array in a gzipped IDX file of unsigned bytes. Raises ValueError when it is something else."""
    with gzip.open(path) as file:
        zeros, kind, dimensions = struct.unpack(">HBB", file.read(4))
        if zeros or kind != _UINT8:
            raise ValueError(f"{path} is not an IDX file of unsigned bytes")
        shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
        content = np.frombuffer(file.read(), dtype=np.uint8)
    if content.size != int(np.prod(shape)):
        raise ValueError(f"{path} has {content.size} values, its header says {shape}")
    return content.reshape(shape)
