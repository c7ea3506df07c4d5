"""Exchange plain values between the ranks of one job, and raise on all ranks what fails on one.

Everything is sent over a separate gloo group, next to the group of the training. So it works the same for NCCL, and
never comes between collectives of the training. Every call here is a collective: all ranks make it, in the same order.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from scarctl.errors import ScarError, Unavailable, error_fields, error_from
from scarctl.state import codec
from scarctl.state.group import DTYPES
from scarctl.store.format import canonical

T = TypeVar("T")

PATIENCE = 120.0
"""Seconds that a rank waits for the others, at most."""

_GONE = "the remaining ranks saved their state as far as possible; restart the job"


def world_size() -> int:
    """Return the number of ranks that train together; 1 without `torch.distributed`."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class Team:
    """All ranks of the default process group. Made and closed by all of them."""

    def __init__(self) -> None:
        """Wait for the other ranks, `PATIENCE` seconds at most.

        Raises Unavailable (kind "rank-missing") if a rank does not join.
        """
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._patience = timedelta(seconds=PATIENCE)
        try:
            self.group = dist.new_group(backend="gloo", timeout=self._patience)
            # Its error names the missing ranks. That of an ordinary collective does not.
            dist.monitored_barrier(self.group, timeout=self._patience, wait_all_ranks=True)
        except (RuntimeError, ValueError) as error:
            raise Unavailable(
                f"not all {self.world} ranks joined within {PATIENCE:g} s{_missing(str(error))}",
                hint="every rank has to call scarctl.attach; nothing was changed",
                kind="rank-missing",
            ) from error

    def subgroup(self) -> dist.ProcessGroup:
        """Create another group of all ranks for a second thread, because two threads cannot share a group."""
        group: dist.ProcessGroup = self.collectively(
            lambda: dist.new_group(backend="gloo", timeout=self._patience)
        )
        return group

    def gather(self, value: object) -> list[Any]:
        """Return the values of all ranks, by rank. Values are plain values and arrays, as in `scarctl.state.codec`."""
        mine = torch.from_numpy(_pack(value))
        sizes = torch.zeros(self.world, dtype=torch.int64)
        sizes[self.rank] = len(mine)
        self.collectively(lambda: dist.all_reduce(sizes, group=self.group))
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        padded[: len(mine)] = mine
        found = [torch.empty_like(padded) for _ in range(self.world)]
        self.collectively(lambda: dist.all_gather(found, padded, group=self.group))
        return [_unpack(data[:size].numpy()) for data, size in zip(found, sizes.tolist(), strict=True)]

    def from_rank(self, rank: int, value: object = None) -> Any:
        """Return the value of `rank` on all ranks. The values that other ranks pass are ignored."""
        mine = torch.from_numpy(_pack(value)) if self.rank == rank else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([len(mine)], dtype=torch.int64)
        self.collectively(lambda: dist.broadcast(size, src=rank, group=self.group))
        if self.rank != rank:
            mine = torch.empty(int(size), dtype=torch.uint8)
        self.collectively(lambda: dist.broadcast(mine, src=rank, group=self.group))
        return _unpack(mine.numpy())

    def agree(self, call: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """Make the call on every rank. If it fails on one rank, raise on all ranks.

        undo: called with the result of this rank when another rank failed.
        Raises the exception of the call on this rank, or else the error of the first rank that failed, with its number.
        """
        value, error = None, None
        try:
            value = call()
        except Exception as caught:
            error = caught
        try:
            answers = self.gather(None if error is None else _fields(error))
        except BaseException:
            if error is None and undo is not None:
                undo(value)  # type: ignore[arg-type]
            raise
        failed = [(rank, fields) for rank, fields in enumerate(answers) if fields is not None]
        if error is not None:
            raise error
        if failed:
            if undo is not None:
                undo(value)  # type: ignore[arg-type]
            rank, fields = failed[0]
            raise error_from({**fields, "message": f"rank {rank}: {fields['message']}"})
        return value  # type: ignore[return-value]

    def close(self) -> None:
        """Leave the group, without waiting for other ranks."""
        # `destroy_process_group()` without an argument has destroyed this group, too.
        if dist.is_initialized():
            dist.destroy_process_group(self.group)

    def collectively(self, call: Callable[[], T]) -> T:
        """Call a collective, and return its result. Raises Unavailable if another rank has died or does not join."""
        try:
            return call()
        except RuntimeError as error:
            raise Unavailable(
                f"rank {self.rank} cannot reach all others: {error}", hint=_GONE, kind="rank-gone"
            ) from error


class Solo(Team):
    """A team of one, without a process group."""

    def __init__(self) -> None:
        self.rank, self.world = 0, 1

    def gather(self, value: object) -> list[Any]:
        """See `Team`."""
        return [value]

    def from_rank(self, rank: int, value: object = None) -> Any:
        """See `Team`."""
        return value

    def agree(self, call: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """See `Team`."""
        return call()

    def close(self) -> None:
        """See `Team`."""


def _missing(text: str) -> str:
    """Return the missing rank that torch's error names, if it waited for a key of that rank, else the error."""
    key = re.search(r"keys: \S*/(\d+)$", text)
    return f": rank {key[1]} is missing" if key else f": {text}"


def _fields(error: Exception) -> dict[str, str]:
    if isinstance(error, ScarError):
        return error_fields(error)
    return error_fields(ScarError(f"{type(error).__name__}: {error}"))


def _pack(value: object) -> NDArray[np.uint8]:
    """Encode a value as bytes: the length of the header, the header, the bytes of the tensors."""
    text, tensors = codec.encode(value)
    head = canonical({"text": text, "tensors": [[n, t.dtype, list(t.shape)] for n, t in tensors.items()]})
    parts = [len(head).to_bytes(8, "little"), head, *(bytes(t.data) for t in tensors.values())]
    return np.frombuffer(bytearray(b"".join(parts)), dtype=np.uint8)


def _unpack(data: NDArray[np.uint8]) -> Any:
    at = 8 + int.from_bytes(data[:8].tobytes(), "little")
    head = json.loads(data[8:at].tobytes())
    tensors = {}
    for name, dtype, shape in head["tensors"]:
        size = DTYPES[dtype] * math.prod(shape)
        tensors[name] = codec.RawTensor(dtype, tuple(shape), data[at : at + size].tobytes())
        at += size
    return codec.decode(head["text"], tensors)
