"""Find the random generators that a loader, its samplers and its dataset have as attributes."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from scarctl.checkpoint.randomness import generators_of
from scarctl.stateful import restore_state, state_of

_INNER = ("sampler", "batch_sampler", "base_dataloader", "dataset", "dl", "transform")
"""Attributes of loaders, samplers and datasets that may have generators."""
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


@functools.lru_cache(1024)
def _is_generator(kind: Any) -> bool:
    """Return whether an object is a generator with a state. The system's generator has no state."""
    return issubclass(kind, _KINDS) and not issubclass(kind, random.SystemRandom)


class Hidden:
    """The generators of a loader in a stable order, but for those that `generators_of` returns."""

    def __init__(self, loader: Any) -> None:
        self._known = set(map(id, generators_of(loader)))
        owners = [loader]
        for owner in owners:
            inner = (getattr(owner, name, None) for name in _INNER)
            owners += [
                item for item in inner if item is not None and all(item is not other for other in owners)
            ]
        self.owners = [owner for owner in owners if hasattr(owner, "__dict__")]
        """Objects that may have generators."""

    def find(self) -> list[Any]:
        """Return the generators that exist now: some are created with the first item."""
        found: dict[int, Any] = {}
        for owner in self.owners:
            for value in list(owner.__dict__.values()):
                kind: Any = type(value)
                if _is_generator(kind) and id(value) not in self._known:
                    found[id(value)] = value
        return list(found.values())

    def states(self) -> list[Any]:
        """Return the states of the generators that exist now."""
        return [state_of(generator) for generator in self.find()] if self.owners else []

    def restore(self, states: Sequence[Any]) -> bool:
        """Restore the result of `states`. Return False, and change nothing, if the number of generators differs."""
        generators = self.find()
        if len(generators) != len(states):
            return False
        for generator, state in zip(generators, states, strict=True):
            restore_state(generator, state)
        return True
