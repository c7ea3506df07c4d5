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

Change = Callable[[torch.optim.Optimizer, dict[str, Any]], object]


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


def other_memory(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    state["exp_avg"].data = state["exp_avg"].t().contiguous().t()


KEEPS: dict[str, Change] = {
    "nothing": lambda optimizer, state: None,
    "loaded": lambda optimizer, state: optimizer.load_state_dict(optimizer.state_dict()),
}
CHANGES: dict[str, Change] = {
    "count": lambda optimizer, state: state.update(step=torch.tensor(40.0)),
    "count in place": lambda optimizer, state: state["step"].add_(3),
    "count as a number": lambda optimizer, state: state.update(step=40),
    "dropped": lambda optimizer, state: optimizer.state.pop(optimizer.param_groups[0]["params"][0]),
    "another key": lambda optimizer, state: state.update(more=torch.tensor(1.0)),
    "other memory": other_memory,
    "rate": lambda optimizer, state: optimizer.param_groups[0].update(lr=0.5),
    "a step": lambda optimizer, state: optimizer.step(),
}
"""What is done with the optimizer, or with the state of its first parameter."""


@pytest.mark.parametrize("name", [*KEEPS, *CHANGES])
def test_a_later_capture_is_like_a_first_one(name: str) -> None:
    model, optimizer, adapter = build()
    train(model, optimizer)
    before = encoded(adapter)
    assert encoded(adapter) == before
    (KEEPS | CHANGES)[name](optimizer, optimizer.state[next(iter(model.parameters()))])
    now = encoded(adapter)
    fresh = TorchAdapter.build(model, [optimizer])
    assert now == encoded(fresh)
    assert (now == before) == (name in KEEPS)
