"""Copy large runs of bytes into live tensors in several threads, each of which takes the next piece when it is done.

Torch's own threads share a copy evenly and wait for the slowest. While other processes are busy, that takes several
times as long.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.arena.slot import Slot
from scarctl.state.torch_dtypes import torch_of
from scarctl.util.arrays import Bytes, Ids
from scarctl.util.worker import run_all

Piece: TypeAlias = tuple[Bytes, Bytes]
"""Target and source."""

LARGE = 1 << 20
"""Bytes from which on several threads are worth their start."""
_PIECE = 4 << 20
_THREADS = 4
"""More threads copy no faster than memory is written."""


def pieces_of(target: torch.Tensor, source: torch.Tensor) -> list[Piece]:
    """Return pieces that make up the copy of `source` into `target`, and count it as one write in place to `target`.

    Return [] if torch has to copy: small tensors, and those that are not plain memory of the host.
    """
    if target.nbytes < LARGE or not (is_plain(target) and is_plain(source)):
        return []
    if target.shape != source.shape or target.dtype != source.dtype:
        return []
    # Torch refuses here what it would refuse for the whole, and caches see that the tensor has changed.
    target.narrow(0, 0, 0).copy_(source.narrow(0, 0, 0))
    into, there = bytes_of(target), bytes_of(source)
    return [(into[i : i + _PIECE], there[i : i + _PIECE]) for i in range(0, into.size, _PIECE)]


def copy_all(pieces: list[Piece]) -> None:
    """Copy the pieces, in as many threads as torch may use, up to four. Returns when all is done."""
    run_all(lambda piece: np.copyto(*piece), pieces, min(_THREADS, torch.get_num_threads()))


def views_of(slot: Slot) -> list[list[torch.Tensor]]:
    """Return views of a slot's tensors, by group and tensor: two calls for each, of which a model may have many."""
    whole = torch.from_numpy(slot.memory())
    of_dtype: dict[str, tuple[torch.Tensor, int]] = {}
    views = []
    for g, group in enumerate(slot.layout.groups):
        mine = []
        for t, spec in enumerate(group.tensors):
            if spec.dtype not in of_dtype:
                dtype = torch_of(spec.dtype)
                of_dtype[spec.dtype] = whole.view(dtype), dtype.itemsize
            flat, size = of_dtype[spec.dtype]
            first = slot.offset(g, t) // size
            mine.append(flat[first : first + spec.nbytes // size].view(spec.shape))
        views.append(mine)
    return views


class NewSlots:
    """Slots that a resume has made. They hold no values yet, and are removed if it fails.

    So copies from the store may be read straight into them, before those of all partitions are verified.
    """

    def __init__(self, tensors: Sequence[Sequence[torch.Tensor]], made: Collection[tuple[int, int]]) -> None:
        """Take those of the live tensors that were made, by group and tensor, and are plain memory of the host."""
        self.rows: dict[tuple[int, int], Bytes] = {
            (g, t): bytes_of(tensor).reshape(tensor.shape[0], -1)
            for g, t in made
            if (tensor := tensors[g][t]).dim() and tensor.nbytes and is_plain(tensor)
        }
        self.written: Ids | None = None
        """By partition, the moment of the copy in memory that the slots have; 0 without one."""

    def have(self, slot: Slot) -> NDArray[np.bool_]:
        """Return of which partitions the slots in `rows` have the copies in this slot: bool (partitions,)."""
        if self.written is None:
            return np.zeros(slot.layout.partitions, dtype=bool)
        there: NDArray[np.bool_] = (self.written > 0) & (self.written == slot.moments)
        return there


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is plain memory of the host, in C order."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not tensor.is_complex()
        and not tensor.is_neg()
    )


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return a view of a plain tensor's memory: uint8, one dimension."""
    flat: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return flat
