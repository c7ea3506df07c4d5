"""Where optimizers keep the state of parameters: in themselves, in what ZeRO has inside, in those that they wrap."""

from __future__ import annotations

from collections.abc import Collection, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from scarctl_adapters.fsdp import params_of, with_state


@dataclass(frozen=True, slots=True)
class Home:
    """One optimizer with a state."""

    optimizer: Optimizer
    prefix: str = ""
    """Of its slots' names: where it is within the optimizer that was given, as "base_optimizer."."""
    shares: bool = False
    """Its state is that of the optimizer around it."""

    @property
    def state(self) -> MutableMapping[Any, Any]:
        """The state that is its own."""
        return {} if self.shares else self.optimizer.state

    def numbers(self) -> dict[int, int]:
        """Its parameters' numbers, by id."""
        return {id(p): number for number, p in enumerate(params_of(self.optimizer))}


def homes_of(optimizer: Optimizer, given: Collection[Optimizer] = ()) -> list[Home]:
    """The optimizer's own, then those of optimizers that are its attributes, unless they were given themselves."""
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
    """What it keeps of parameters, by their ids: to look one up in its state fails where a key is an address."""
    return {id(key): kept for key, kept in optimizer.state.items() if isinstance(key, torch.Tensor)}


Holder = tuple[nn.Parameter, str]
"""A parameter of a group, and what its slots' names end with: "" for the group's own, "@name" for one that shares its
memory."""


def slot_of(
    name: str, holders: Sequence[Holder], homes: Sequence[Home]
) -> tuple[Optimizer, nn.Parameter, str] | None:
    """Whose state has a slot of this name of a group, of which parameter, by which key; None: nobody's."""
    ways = [
        (home, parameter, label)
        for home in homes
        for parameter, label in holders
        if not home.shares
        and name.startswith(home.prefix)
        and name.endswith(label)
        and id(parameter) in home.numbers()
    ]
    if not ways:
        return None
    home, parameter, label = max(ways, key=lambda way: len(way[0].prefix) + len(way[2]))
    return home.optimizer, parameter, name[len(home.prefix) : len(name) - len(label)]
