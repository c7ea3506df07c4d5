"""Test that a remembered capture of the optimizer's state is dropped as soon as the state changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from scarctl.state import codec
from scarctl.state.torch_dtypes import plain
from scarctl_adapters.torch import TorchAdapter


def build() -> tuple[nn.Module, torch.optim.Optimizer, TorchAdapter]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    return model, optimizer, TorchAdapter.build(model, [optimizer])


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()


def encoded(adapter: TorchAdapter) -> Any:
    adapter.groups()
    text, tensors = codec.encode(plain({**adapter.capture(), "rng": None}))
    return text, [bytes(tensor.data) for tensor in tensors.values()]


def nothing(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    pass


def count(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    first = next(iter(model.parameters()))
    optimizer.state[first]["step"] = torch.tensor(40.0)


def count_in_place(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    first = next(iter(model.parameters()))
    optimizer.state[first]["step"].add_(3)


def count_as_a_number(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    first = next(iter(model.parameters()))
    optimizer.state[first]["step"] = 40


def loaded(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def dropped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    del optimizer.state[next(iter(model.parameters()))]


def another_key(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    first = next(iter(model.parameters()))
    optimizer.state[first]["more"] = torch.tensor(1.0)


def other_memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    first = next(iter(model.parameters()))
    slot = optimizer.state[first]["exp_avg"]
    slot.data = slot.t().contiguous().t()


def rate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


CHANGES: list[Callable[[nn.Module, torch.optim.Optimizer], None]] = [
    nothing,
    count,
    count_in_place,
    count_as_a_number,
    loaded,
    dropped,
    another_key,
    other_memory,
    rate,
    train,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_later_capture_is_like_a_first_one(change: Callable[..., None]) -> None:
    model, optimizer, adapter = build()
    train(model, optimizer)
    before = encoded(adapter)
    assert encoded(adapter) == before
    change(model, optimizer)
    now = encoded(adapter)
    fresh = TorchAdapter.build(model, [optimizer])
    assert now == encoded(fresh)
    assert (now == before) == (change in (nothing, loaded))
