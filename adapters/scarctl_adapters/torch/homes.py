"""Find the optimizers that hold state: a given one, ZeRO's inner one, and those that a given one wraps."""

from __future__ import annotations

from collections.abc import Collection, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from scarctl_adapters.torch.sharding import params_of, with_state


@dataclass(frozen=True, slots=True)
class Home:
    """An optimizer that holds state of parameters."""

    optimizer: Optimizer
    prefix: str = ""
    """Prefix of its slots' names: its path within the given optimizer, such as "base_optimizer."."""
    shares: bool = False
    """Whether its state is the enclosing optimizer's."""

    @property
    def state(self) -> MutableMapping[Any, Any]:
        """Its own state; {} if it shares another optimizer's."""
        return {} if self.shares else self.optimizer.state

    def numbers(self) -> dict[int, int]:
        """Return the numbers of its parameters, by id."""
        return {id(p): number for number, p in enumerate(params_of(self.optimizer))}


def homes_of(optimizer: Optimizer, given: Collection[Optimizer] = ()) -> list[Home]:
    """Return the optimizer's own home, then those of optimizers in its attributes, except the `given` ones."""
    seen = {id(o) for o in given} | {id(optimizer)}
    return list(_homes(with_state(optimizer), "", seen, set()))


def _homes(optimizer: Optimizer, prefix: str, seen: set[int], states: set[int]) -> Iterator[Home]:
    yield Home(optimizer, prefix, id(optimizer.state) in states)
    seen.add(id(optimizer))
    states.add(id(optimizer.state))
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer) and id(value) not in seen:
            yield from _homes(value, f"{prefix}{name}.", seen, states)


def states_of(optimizer: Optimizer) -> dict[int, MutableMapping[str, Any]]:
    """Return the state of parameters by id. A lookup in `optimizer.state` fails if a key is a plain id."""
    return {id(key): kept for key, kept in optimizer.state.items() if isinstance(key, torch.Tensor)}


Holder = tuple[nn.Parameter, str]
"""A parameter of a group, and the suffix of its slots' names: "" for the group's own, "@name" for one that shares its
memory."""


def slot_of(
    name: str, holders: Sequence[Holder], homes: Sequence[tuple[Home, Collection[int]]]
) -> tuple[Optimizer, nn.Parameter, str] | None:
    """Return the optimizer, parameter and key of a group's slot of this name; None if no optimizer has it.

    homes: each with the ids of its parameters.
    """
    ways = [
        (home, parameter, label)
        for home, known in homes
        for parameter, label in holders
        if not home.shares
        and name.startswith(home.prefix)
        and name.endswith(label)
        and id(parameter) in known
    ]
    if not ways:
        return None
    home, parameter, label = max(ways, key=lambda way: len(way[0].prefix) + len(way[2]))
    return home.optimizer, parameter, name[len(home.prefix) : len(name) - len(label)]
