"""Exchange plain values between the ranks of one job, and raise one rank's failure on all ranks.

Everything is sent over a separate gloo group, in addition to training's own group. So it works the same with NCCL, and
never comes between collectives of the training. Every call here is a collective: all ranks make it, in the same order.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from scarctl.errors import ScarError, Unavailable, error_fields, error_from
from scarctl.state import codec
from scarctl.state.group import DTYPES
from scarctl.state.raw_tensor import RawTensor
from scarctl.store.format import canonical
from scarctl.util.worker import Job

T = TypeVar("T")

PATIENCE = 120.0
"""Most seconds that a rank waits for the others."""

_PULSE = 1 / 12
"""Share of `PATIENCE` after which ranks exchange that they live, while one of them makes a long call."""
_FIRST = 1016
"""Bytes of a value that the first exchange carries. The rest of a longer value takes a second one."""

_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"

_GONE = "the remaining ranks saved their state as far as possible; restart the job"


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
            # Its error names the missing ranks, unlike an ordinary collective's.
            dist.monitored_barrier(self.group, timeout=self._patience, wait_all_ranks=True)
        except (RuntimeError, ValueError) as error:
            raise not_joined(self.world, str(error), os.environ) from error

    def subgroup(self) -> dist.ProcessGroup:
        """Create another group of all ranks for a second thread, because two threads cannot share a group."""
        group: dist.ProcessGroup = self.collectively(
            lambda: dist.new_group(backend="gloo", timeout=self._patience)
        )
        return group

    def gather(self, value: object) -> list[Any]:
        """Return the values of all ranks, by rank. Values are plain values and arrays, as in `scarctl.state.codec`."""
        mine = _pack(value)
        heads = self._all(_head_of(mine))
        longest = max(_size_in(head) for head in heads)
        rests: list[NDArray[np.uint8]] = [np.empty(0, np.uint8)] * self.world
        if longest > _FIRST:
            padded = np.zeros(longest - _FIRST, np.uint8)
            padded[: max(0, len(mine) - _FIRST)] = mine[_FIRST:]
            rests = self._all(padded)
        return [_unpack(_joined(head, rest)) for head, rest in zip(heads, rests, strict=True)]

    def _all(self, mine: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """Return the bytes of all ranks, of equal length, by rank."""
        own = torch.from_numpy(mine)
        found = [torch.empty_like(own) for _ in range(self.world)]
        self.collectively(lambda: dist.all_gather(found, own, group=self.group))
        return [data.numpy() for data in found]

    def from_rank(self, rank: int, value: object = None) -> Any:
        """Return the value of `rank` on all ranks. The values that other ranks pass are ignored."""
        mine = _pack(value) if self.rank == rank else np.empty(0, np.uint8)
        head = _head_of(mine)
        self.collectively(lambda: dist.broadcast(torch.from_numpy(head), src=rank, group=self.group))
        rest = np.zeros(max(0, _size_in(head) - _FIRST), np.uint8)
        rest[: max(0, len(mine) - _FIRST)] = mine[_FIRST:]
        if rest.size:
            self.collectively(lambda: dist.broadcast(torch.from_numpy(rest), src=rank, group=self.group))
        return _unpack(_joined(head, rest))

    def agree(self, call: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """Make the call on every rank. If it fails on one rank, raise on all ranks.

        undo: called with the result of this rank when another rank failed.
        Raises the exception of this rank's call, otherwise the error of the first rank that failed, with its number.
        """
        value, _ = self._agree(call, undo, lambda _: None)
        return value

    def collect(self, call: Callable[[], T]) -> list[T]:
        """Make the call on every rank, and return the results of all ranks, by rank. Values are as in `gather`.

        Raises as `agree` does.
        """
        _, found = self._agree(call, None, lambda value: value)
        return found

    def patiently(self, call: Callable[[], T]) -> T:
        """Make a call in a thread that may take longer than ranks wait for each other. Return this rank's result.

        Until it has ended on all ranks, they exchange that they live. Raises the exception of this rank's call then.
        """
        job = Job(call)
        threading.Thread(target=job.run, name="scarctl-patiently", daemon=True).start()
        while not all(self.gather(job.settle(self._patience.total_seconds() * _PULSE))):
            pass
        return job.wait()

    def _agree(
        self, call: Callable[[], T], undo: Callable[[T], object] | None, shown: Callable[[T], object]
    ) -> tuple[T, list[Any]]:
        """Return this rank's result of the call, and the `shown` part of every rank's result. See `agree`."""
        value, error = None, None
        try:
            value = call()
        except Exception as caught:
            error = caught
        try:
            mine = [_fields(error), None] if error is not None else [None, shown(value)]  # type: ignore[arg-type]
            answers = self.gather(mine)
        except BaseException:
            if error is None and undo is not None:
                undo(value)  # type: ignore[arg-type]
            raise
        failed = [(rank, fields) for rank, (fields, _) in enumerate(answers) if fields is not None]
        if error is not None:
            raise error
        if failed:
            if undo is not None:
                undo(value)  # type: ignore[arg-type]
            rank, fields = failed[0]
            raise error_from({**fields, "message": f"rank {rank}: {fields['message']}"})
        return value, [found for _, found in answers]  # type: ignore[return-value]

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
        return [value]

    def from_rank(self, rank: int, value: object = None) -> Any:
        return value

    def agree(self, call: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        return call()

    def collect(self, call: Callable[[], T]) -> list[T]:
        return [call()]

    def patiently(self, call: Callable[[], T]) -> T:
        return call()

    def close(self) -> None:
        """See `Team`."""


def not_joined(world: int, text: str, environment: Mapping[str, str]) -> Unavailable:
    """Return the error for ranks that did not meet. text: torch's error, which may name a missing rank's key."""
    key = re.search(r"keys: \S*/(\d+)$", text)
    message = f"the {world} ranks could not connect: {text}"
    if key:
        message = f"not all {world} ranks joined within {PATIENCE:g} s: rank {key[1]} is missing"
    hint = "every rank has to call scarctl.attach; nothing was changed"
    # torchrun keeps its store over a restart, and with it the addresses of ranks that are dead.
    restarted = environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if restarted and environment.get(_OWN_STORE) != "1":
        hint = f"set {_OWN_STORE}=1 for torchrun: otherwise restarted ranks connect to dead ones; nothing was changed"
    return Unavailable(message, hint=hint, kind="rank-missing")


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


def _head_of(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the length of `data` and its first bytes, for the first exchange. Usually these are all bytes."""
    head = np.zeros(8 + _FIRST, np.uint8)
    head[:8] = np.frombuffer(len(data).to_bytes(8, "little"), np.uint8)
    head[8 : 8 + len(data)] = data[:_FIRST]
    return head


def _size_in(head: NDArray[np.uint8]) -> int:
    return int.from_bytes(head[:8].tobytes(), "little")


def _joined(head: NDArray[np.uint8], rest: NDArray[np.uint8]) -> NDArray[np.uint8]:
    size = _size_in(head)
    first = head[8 : 8 + min(size, _FIRST)]
    return first if size <= _FIRST else np.concatenate([first, rest[: size - _FIRST]])


def _unpack(data: NDArray[np.uint8]) -> Any:
    at = 8 + int.from_bytes(data[:8].tobytes(), "little")
    head = json.loads(data[8:at].tobytes())
    tensors = {}
    for name, dtype, shape in head["tensors"]:
        size = DTYPES[dtype] * math.prod(shape)
        tensors[name] = RawTensor(dtype, tuple(shape), data[at : at + size].tobytes())
        at += size
    return codec.decode(head["text"], tensors)
