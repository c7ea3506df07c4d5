"""Test whether replaced parts of sharded parameters are noticed, on torch's process group for one process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from scarctl.distributed.owned_adapter import OwnedAdapter, holdings_of
from scarctl.distributed.ownership import divide
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
    def weight(self) -> DTensor:
        found = self.model[0].weight
        assert isinstance(found, DTensor)
        return found


def test_steps_replace_nothing() -> None:
    training = Sharded()
    for _ in range(3):
        assert training.same()
        training.step()


def _replace_a_part(t: Sharded) -> None:
    t.weight._local_tensor = t.weight._local_tensor.clone()


def _replace_its_memory(t: Sharded) -> None:
    t.weight._local_tensor.data = t.weight._local_tensor.data.clone()


def _move(t: Sharded) -> None:
    t.model.double()


def _freeze(t: Sharded) -> None:
    t.weight.requires_grad_(False)


def _replace_a_slot(t: Sharded) -> None:
    state = t.optimizer.state[t.model[0].weight]
    state["exp_avg"] = state["exp_avg"].clone()


def _replace_a_slots_part(t: Sharded) -> None:
    slot = t.optimizer.state[t.model[0].weight]["exp_avg"]
    slot._local_tensor = slot._local_tensor.clone()


def _divide_otherwise(t: Sharded) -> None:
    spec = t.weight._spec
    t.weight._spec = type(spec)(spec.mesh, (torch.distributed.tensor.Shard(1),), spec.tensor_meta)


def _gather(t: Sharded) -> None:
    t.model.unshard()


CHANGES = [
    _replace_a_part,
    _replace_its_memory,
    _move,
    _freeze,
    _replace_a_slot,
    _replace_a_slots_part,
    _divide_otherwise,
    _gather,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_what_is_replaced_is_seen(change: Callable[[Sharded], None]) -> None:
    training = Sharded()
    assert training.same()
    change(training)
    assert not training.same()


def test_groups_are_collected_once() -> None:
    training = Sharded()
    adapter = TorchAdapter.build(training.model, [training.optimizer])
    before = adapter.groups()
    training.step()
    assert all(a is b for a, b in zip(before, adapter.groups(), strict=True))
    _replace_a_part(training)
    assert adapter.groups()[0].tensors[""].data_ptr() == training.weight._local_tensor.data_ptr()


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


def _owned(adapter: TorchAdapter) -> OwnedAdapter:
    """Return rank 0's part of state that both ranks hold."""
    held = holdings_of(adapter.groups())
    return OwnedAdapter(adapter, divide([held, held]), 0, adapter.groups())


def test_owned_rows_are_cut_once() -> None:
    model = nn.Linear(1024, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    owned = _owned(TorchAdapter.build(model, [optimizer], replicated=["*"]))
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    owned.groups()
    before = owned.groups()
    optimizer.step()
    again = owned.groups()
    assert all(a is b for a, b in zip(before, again, strict=True))
    again.clear()
    assert len(owned.groups()) == len(before)
    model.weight.data = model.weight.data.clone()
    pointers = {group.name: group.tensors[""].data_ptr() for group in owned.groups()}
    assert pointers["weight"] == model.weight.data_ptr()


def test_what_the_model_was_made_of_is_let_go_before_the_first_step() -> None:
    values = np.zeros((64, 1024), np.float32)
    gone = weakref.ref(values)
    model = nn.Module()
    model.weight = nn.Parameter(torch.from_numpy(values))
    del values
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    owned = _owned(TorchAdapter.build(model, [optimizer], replicated=["*"]))
    owned.groups()
    owned.groups()
    assert gone() is not None
    model.half()
    gc.collect()
    assert gone() is None
