"""Test whether replaced parts of sharded parameters are noticed, on torch's process group for one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from scarctl_adapters.torch import TorchAdapter
from scarctl_adapters.torch.identity import Tensors, tensors_now


@pytest.fixture(autouse=True)
def rank() -> Iterator[None]:
    """Make this process rank 0 of two."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class Sharded:
    """Two layers under FSDP2. Gradients are given: the other rank does not exist."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.before: Tensors | None = None
        self.step()
        assert not self.same()

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def same(self) -> bool:
        """Return whether the state is the same as at the last call."""
        before, self.before = self.before, tensors_now(self.model, [self.optimizer])
        assert self.before is not None
        return before is not None and before.hold()

    @property
    def slots(self) -> dict[str, Any]:
        """The optimizer's state of the first weight."""
        found: dict[str, Any] = self.optimizer.state[self.model[0].weight]
        return found

    @property
    def weight(self) -> DTensor:
        found = self.model[0].weight
        assert isinstance(found, DTensor)
        return found


def test_steps_replace_nothing() -> None:
    training = Sharded()
    for _ in range(3):
        assert training.same()
        training.step()


def _replace_its_memory(t: Sharded) -> None:
    t.weight._local_tensor.data = t.weight._local_tensor.data.clone()


def _replace_a_slots_part(t: Sharded) -> None:
    slot = t.slots["exp_avg"]
    slot._local_tensor = slot._local_tensor.clone()


def _divide_otherwise(t: Sharded) -> None:
    spec = t.weight._spec
    t.weight._spec = type(spec)(spec.mesh, (torch.distributed.tensor.Shard(1),), spec.tensor_meta)


CHANGES: dict[str, Callable[[Sharded], object]] = {
    "a part": lambda t: setattr(t.weight, "_local_tensor", t.weight._local_tensor.clone()),
    "its memory": _replace_its_memory,
    "a slot": lambda t: t.slots.update(exp_avg=t.slots["exp_avg"].clone()),
    "a slot's part": _replace_a_slots_part,
    "divided otherwise": _divide_otherwise,
    "gathered": lambda t: t.model.unshard(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_replaced_is_seen(name: str) -> None:
    training = Sharded()
    assert training.same()
    CHANGES[name](training)
    assert not training.same()


def test_what_is_replaced_while_parameters_are_gathered_is_seen() -> None:
    """Gathered parameters are the same objects from one forward to the next."""
    training = Sharded()
    adapter = TorchAdapter.build(training.model, [training.optimizer])
    sharded = training.weight
    for _ in range(2):
        adapter.groups()
        training.model.unshard()
        assert not isinstance(training.model[0].weight, DTensor)
        adapter.groups()
        sharded._local_tensor = sharded._local_tensor.clone()
        assert adapter.groups()[0].tensors[""].data_ptr() == sharded._local_tensor.data_ptr()
        training.model.reshard()
