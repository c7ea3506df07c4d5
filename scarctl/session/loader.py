"""Find a loader's state in addition to its position: its own generators, and the batch that it returned last.

Find also a `DataLoader` that the loop reads without the session: which of its batches comes next is not saved.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from scarctl.checkpoint.randomness import generators_of
from scarctl.state.torch_dtypes import Deferred
from scarctl.stateful import restore_state, state_of

_INNER = ("sampler", "batch_sampler", "base_dataloader", "dataset", "dl", "transform")
"""Attributes of loaders, samplers and datasets that may have generators."""
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_SAMPLES = 4096
"""Values of a large tensor that are compared."""
_LOOKS = (3, 4)
"""Steps of this process before which the iterators are compared. Reading all objects takes up to 0.1 s."""
_MOST = 1024
"""Most parts of a batch that are compared. The loop waits while they are noted."""


@functools.lru_cache(1024)
def _is_generator(kind: type) -> bool:
    """Return whether an object is a generator with a state. The system's generator has no state."""
    return issubclass(kind, _KINDS) and not issubclass(kind, random.SystemRandom)


class Hidden:
    """The generators that a loader, its samplers and its dataset have as attributes, in a stable order.

    Those that `generators_of` returns are left out.
    """

    def __init__(self, loader: Any) -> None:
        self._known = set(map(id, generators_of(loader)))
        self._owners = owners = [loader]
        for owner in owners:
            inner = (getattr(owner, name, None) for name in _INNER)
            owners += [
                item for item in inner if item is not None and all(item is not other for other in owners)
            ]

    def find(self) -> list[Any]:
        """Return the generators that exist now: some are created with the first item."""
        found: dict[int, Any] = {}
        for owner in self._owners:
            for value in list(getattr(owner, "__dict__", {}).values()):
                kind: Any = type(value)
                if _is_generator(kind) and id(value) not in self._known:
                    found[id(value)] = value
        return list(found.values())


def states_of(generators: Sequence[Any]) -> list[Any]:
    """Return the states of these generators."""
    return [state_of(generator) for generator in generators]


def restore_states(generators: Sequence[Any], states: Sequence[Any]) -> bool:
    """Restore the result of `states_of`. Return False, and change nothing, if the number of generators differs."""
    if len(generators) != len(states):
        return False
    for generator, state in zip(generators, states, strict=True):
        restore_state(generator, state)
    return True


class Given(Deferred):
    """A batch that the loop received. Its value is a digest, or None if nothing in it can be compared."""

    __slots__ = ("_parts",)

    def __init__(self, batch: Any) -> None:
        parts = itertools.islice(_parts_of(batch, 3), _MOST)
        self._parts = [(part, getattr(part, "_version", 0)) for part in parts if part is not None]

    def value(self) -> str | None:
        """Return the digest: of all values, or of samples of large tensors.

        None if the loop has changed a tensor, or if one cannot be read.
        """
        try:
            return self._digest()
        except (
            Exception
        ):  # of a subclass, a freed storage or a device: without a comparison the checkpoint is whole
            return None

    def _digest(self) -> str | None:
        total = hashlib.blake2b(digest_size=12)
        for part, version in self._parts:
            if not isinstance(part, torch.Tensor):
                total.update(repr(part).encode())
                continue
            if part._version != version:
                return None
            flat = part.detach().reshape(-1)
            total.update(f"{part.dtype} {tuple(part.shape)}".encode())
            if flat.numel() > 2 * _SAMPLES:
                flat = flat[:: flat.numel() // _SAMPLES]
            total.update(flat.cpu().contiguous().view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        return total.hexdigest() if self._parts else None


def _parts_of(batch: Any, depth: int) -> Iterator[Any]:
    """Yield the strided tensors, plain values and lengths of a batch, and None for each item of another kind."""
    if isinstance(batch, torch.Tensor):
        comparable = batch.layout is torch.strided and not batch.is_nested and not batch.is_inference()
        yield batch if comparable else None
    elif isinstance(batch, int | float | str | bool):
        yield batch
    elif depth and isinstance(batch, Mapping | list | tuple):
        yield len(batch)
        for item in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _parts_of(item, depth - 1)
    else:
        yield None


def iterators() -> Iterator[_BaseDataLoaderIter]:
    """Yield this process's iterators over DataLoaders."""
    # isinstance would read __class__ of every object, and some objects of torch warn when an attribute is read.
    return (item for item in gc.get_objects() if issubclass(type(item), _BaseDataLoaderIter))


class OtherLoaders:
    """Compares the iterators before two steps: one that has moved on, or was replaced, is read in every iteration.

    A validation's iterator is gone by then, or stays where it is.
    """

    def __init__(self) -> None:
        self._steps, self._head = 0, -1
        self._seen: set[tuple[int, int]] = set()
        """Id and number of batches of each iterator that had begun."""

    def advance(self, mine: set[int], head: int) -> bool:
        """Return whether another iterator has moved on, before the step after `head`. mine: ids of known ones."""
        if head == self._head or self._steps > max(_LOOKS):
            return False
        self._steps, self._head = self._steps + 1, head
        if self._steps not in _LOOKS:
            return False
        before = self._seen
        self._seen = {(id(i), i._num_yielded) for i in iterators() if id(i) not in mine and i._num_yielded}
        return bool(before and self._seen - before)
