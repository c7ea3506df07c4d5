"""Test that optimizers which step late have their slots in the layout from the first checkpoint on."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import scarctl
from scarctl_adapters.torch.slots import Slots
from tests.adapters.torch.test_adapter import OPTIMIZERS, make_model, train

FORETOLD: dict[str, Callable[..., torch.optim.Optimizer]] = {
    **OPTIMIZERS,
    "one group without momentum": lambda p: torch.optim.SGD(
        [{"params": [q]} if q.dim() == 1 else {"params": [q], "momentum": 0.9} for q in p], lr=0.1
    ),
    "scheduled": lambda p: torch.optim.lr_scheduler.StepLR(torch.optim.Adam(p), 1).optimizer,
}


def described(slots: Slots, model: nn.Module) -> dict[str, dict[str, Any]]:
    return {
        name: {slot: (t.dtype, tuple(t.shape)) for slot, t in slots.of(parameter).items()}
        for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("name", sorted(FORETOLD.keys() - {"lbfgs"}))
def test_slots_are_predicted_as_they_will_be(name: str) -> None:
    model = make_model()
    optimizer = FORETOLD[name](model.parameters())
    before, generators = repr(optimizer.state_dict()), (torch.get_rng_state(), random.getstate())
    slots = Slots(optimizer)
    slots.learn(predict=True)
    foretold = described(slots, model)
    assert repr(optimizer.state_dict()) == before
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    train(model, optimizer, 1)
    slots.learn(predict=True)
    assert described(slots, model) == foretold


def test_an_optimizer_of_sparse_gradients() -> None:
    table = nn.EmbeddingBag(20, 4, sparse=True)
    slots = Slots(torch.optim.SparseAdam(table.parameters()))
    slots.learn(predict=True)
    assert list(slots.of(table.weight)) == ["exp_avg", "exp_avg_sq"]


def test_an_optimizer_that_cannot_be_tried_out_has_no_slots_yet() -> None:
    class Asks(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError("not without a closure")

    model = nn.Linear(2, 2)
    slots = Slots(Asks(model.parameters(), {}))
    slots.learn(predict=True)
    assert slots.of(model.weight) == {}


def test_hooks_and_attributes_of_the_optimizer_are_left_alone() -> None:
    class Counts(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            self.steps += 1
            return super().step(closure)

    model, called = nn.Linear(2, 2), []
    optimizer = Counts(model.parameters(), momentum=0.9)
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    slots = Slots(optimizer)
    slots.learn(predict=True)
    assert list(slots.of(model.weight)) == ["momentum_buffer"]
    assert called == []
    assert optimizer.steps == 0


def test_a_parameter_without_dimensions() -> None:
    scale = nn.Parameter(torch.ones([]))
    for made, expected in (
        (torch.optim.SGD, []),
        (torch.optim.Adam, ["exp_avg", "exp_avg_sq"]),
        (torch.optim.SparseAdam, []),  # nor does it step one
    ):
        slots = Slots(made([scale], lr=0.1))
        slots.learn(predict=True)
        assert list(slots.of(scale)) == expected


class Delegates(torch.optim.Optimizer):
    """A wrapper like Accelerate's, whose state and groups are those of another optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state, lambda self, to: setattr(self.optimizer, "state", to))
    param_groups = property(
        lambda self: self.optimizer.param_groups, lambda self, to: setattr(self.optimizer, "param_groups", to)
    )
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class OwnList(torch.optim.Optimizer):
    """An optimizer that iterates over its own list of parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.all = [p for group in optimizer.param_groups for p in group["params"]]
        super().__init__(self.all, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.all:
            parameter.sub_(parameter.grad)


class OwnBuffer(torch.optim.Optimizer):
    """An optimizer with a tensor in its parameter group that all parameters add to."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        for group in self.param_groups:
            group["steps"] = torch.zeros(())

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] += 1
            random.random()


@pytest.mark.parametrize("kind", [Delegates, OwnList, OwnBuffer])
def test_what_an_optimizer_can_reach_is_left_alone(
    kind: Callable[[torch.optim.Optimizer], torch.optim.Optimizer],
) -> None:
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = kind(inner)
    model(torch.ones(1, 2)).sum().backward()
    groups, before, generator = inner.param_groups, repr(optimizer.param_groups), random.getstate()
    values = [p.clone() for p in model.parameters()]
    slots = Slots(optimizer)
    slots.learn(predict=True)
    assert slots.of(model.weight) == {}
    assert inner.param_groups is groups
    assert repr(optimizer.param_groups) == before
    assert random.getstate() == generator
    for value, parameter in zip(values, model.parameters(), strict=True):
        assert torch.equal(value, parameter)


def test_what_cannot_be_tried_out_keeps_what_it_keeps_of_others() -> None:
    class Holds(torch.optim.Adam):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            self.held: list[Any] = []

    model = nn.Linear(2, 2)
    optimizer = Holds(model.parameters())
    model.weight.grad = torch.ones(2, 2)
    optimizer.step()
    slots = Slots(optimizer)
    slots.learn(predict=True)
    assert list(slots.of(model.bias)) == ["exp_avg", "exp_avg_sq"]


class Adversarial:
    """A generator trained every third iteration, and a discriminator trained in all of them."""

    def __init__(self, store: Path, critic: Callable[..., torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleDict({"make": nn.Linear(3, 4), "tell": nn.Linear(4, 1)})
        self.make = torch.optim.Adam(self.model["make"].parameters(), lr=0.1)
        self.tell = critic(self.model["tell"].parameters(), lr=0.1)
        self.session = scarctl.attach(
            self.model,
            [self.make, self.tell],
            store=store,
            interval=1,
            fraction=1.0,
            settings=scarctl.Settings(daemon=False),
        )

    def train(self, first: int, last: int) -> None:
        """Run iterations `first` to `last`."""
        for iteration in range(first, last + 1):
            self.make.zero_grad()
            self.tell.zero_grad()
            noise = torch.randn(8, 3, generator=torch.Generator().manual_seed(iteration))
            loss = self.model["tell"](self.model["make"](noise)).square().mean()
            loss.backward()
            if iteration % 3 == 0:
                self.make.step()
            self.tell.step()

    def values(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


@pytest.mark.parametrize(("critic", "stop"), [(torch.optim.Adam, 2), (torch.optim.SGD, 3)])
def test_an_optimizer_that_steps_every_third_iteration(
    tmp_path: Path, stop: int, critic: Callable[..., torch.optim.Optimizer]
) -> None:
    whole = Adversarial(tmp_path / "whole", critic)
    whole.train(1, 8)
    assert whole.session.stats.errors == 0
    whole.session.close()
    run = Adversarial(tmp_path / "store", critic)
    run.train(1, stop)
    run.session.checkpoint(full=True, wait=True)
    assert run.session.stats.errors == 0
    run.session.close()
    again = Adversarial(tmp_path / "store", critic)
    assert again.session.resume().step == stop
    again.train(stop + 1, 8)
    assert again.session.stats.errors == 0
    for name, value in again.values().items():
        assert torch.equal(value, whole.values()[name]), name
    again.session.close()
