"""Test whether replaced tensors are noticed, and that their values are saved."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import swap_tensors

import scarctl
from scarctl.config import grouped
from scarctl_adapters.torch import TorchAdapter
from scarctl_adapters.torch.identity import Tensors, tensors_now
from tests.support.training import drained


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.step()
        self.before: Tensors | None = None
        assert not self.same()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 4)).square().sum().backward()
        self.optimizer.step()

    @property
    def slots(self) -> dict[str, torch.Tensor]:
        """The optimizer's state of the first parameter."""
        found: dict[str, torch.Tensor] = self.optimizer.state[self.model[0].weight]
        return found

    def same(self) -> bool:
        """Return whether the state is the same as at the last call."""
        before, self.before = self.before, tensors_now(self.model, [self.optimizer])
        assert self.before is not None
        return before is not None and before.hold()


Change = Callable[[Training], object]


def test_steps_replace_nothing() -> None:
    training = Training()
    for _ in range(3):
        assert training.same()
        training.step()
        training.model.eval()
        training.model.train()


def _replace_its_data(t: Training) -> None:
    t.model[0].weight.data = t.model[0].weight.data.clone()


def _load_the_optimizer(t: Training) -> None:
    t.optimizer.load_state_dict(deepcopy(t.optimizer.state_dict()))


def _exchange_modules(t: Training) -> None:
    t.model[0].weight, t.model[2].weight = t.model[2].weight, t.model[0].weight


def _empty_a_storage(t: Training) -> None:
    """Replace a tensor, whose memory the next one may get."""
    weight = t.model[0].weight
    weight.untyped_storage().resize_(0)
    weight.data = torch.zeros(8, 4)


def _exchange_a_module_with_the_same_tensors(t: Training) -> None:
    new = nn.BatchNorm1d(8)
    new._parameters, new._buffers = dict(t.model[1]._parameters), dict(t.model[1]._buffers)
    t.model[1] = new


def _load_the_same_names(t: Training) -> None:
    """Replace the key of a state by another object that compares equal."""
    t.slots["".join(["exp_", "avg"])] = t.slots.pop("exp_avg")
    t.slots["exp_avg_sq"] = t.slots.pop("exp_avg_sq")


NO_CHANGES: dict[str, Change] = {
    "a hidden buffer": lambda t: t.model[1].register_buffer("cache", torch.zeros(3), persistent=False),
    # Step counts are not slots: some optimizers make a new tensor for them in every step.
    "another count": lambda t: t.slots.update(step=t.slots["step"].clone()),
    # A resume makes slots first, and restores counts later.
    "no count": lambda t: t.slots.pop("step"),
    "the same names": _load_the_same_names,
}
CHANGES: dict[str, Change] = {
    "a parameter": lambda t: setattr(t.model[0], "weight", nn.Parameter(t.model[0].weight.detach().clone())),
    "its data": _replace_its_data,
    "its strides": lambda t: setattr(t.model[2].weight, "data", t.model[2].weight.data.view(8, 2).t()),
    "its size": lambda t: setattr(t.model[2].weight, "data", t.model[2].weight.data[:1]),
    "its dtype": lambda t: t.model.double(),
    "its insides": lambda t: swap_tensors(t.model[0].weight, nn.Parameter(t.model[0].weight.data)),
    "a storage": _empty_a_storage,
    "frozen": lambda t: t.model[0].weight.requires_grad_(False),
    "a module": lambda t: t.model.__setitem__(2, nn.Linear(8, 2)),
    "two modules": _exchange_modules,
    "a module with the same tensors": _exchange_a_module_with_the_same_tensors,
    "a buffer": lambda t: setattr(t.model[1], "running_mean", torch.zeros(8)),
    "a buffer that is hidden": lambda t: t.model[1]._non_persistent_buffers_set.add("running_mean"),
    "a slot": lambda t: t.slots.update(exp_avg=torch.zeros(8, 4)),
    "no slot": lambda t: t.slots.pop("exp_avg"),
    "no state": lambda t: t.optimizer.state.update({t.model[0].weight: {}}),
    "all states": _load_the_optimizer,
    "more parameters": lambda t: t.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]}),
}
"""What is replaced, and how."""


@pytest.mark.parametrize("name", [*NO_CHANGES, *CHANGES])
def test_what_is_replaced_is_seen_if_it_is_saved(name: str) -> None:
    training = Training()
    assert training.same()
    (NO_CHANGES | CHANGES)[name](training)
    assert training.same() == (name in NO_CHANGES)
    assert training.same()


def test_what_the_model_was_made_of_is_let_go_before_the_first_step(tmp_path: Path) -> None:
    """A model is often moved to a GPU, or made smaller, after attaching."""
    values = np.zeros((64, 64), np.float32)
    gone = weakref.ref(values)
    model = nn.Module()
    model.weight = nn.Parameter(torch.from_numpy(values))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    del values
    with scarctl.attach(model, optimizer, store=tmp_path / "store", settings=scarctl.Settings(daemon=False)):
        assert gone() is not None
        model.half()
        gc.collect()
        assert gone() is None


class _TellsItself(nn.Module):
    """A module that reports a parameter which is not one of its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.hidden = [nn.Parameter(torch.zeros(2))]

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from super().named_parameters(*args, **options)
        yield "hidden", self.hidden[0]


class _TellsBuffers(nn.Module):
    def named_buffers(self, *args: Any, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().named_buffers(*args, **options)


def test_a_model_that_tells_itself_what_it_has_is_asked_every_time(tmp_path: Path) -> None:
    def attached() -> tuple[_TellsItself, torch.optim.Optimizer, scarctl.Session]:
        model = _TellsItself()
        optimizer = torch.optim.SGD([model.weight], lr=0.1)
        session = scarctl.attach(
            model, optimizer, store=tmp_path / "store", interval=1, settings=scarctl.Settings(daemon=False)
        )
        return model, optimizer, session

    def step(model: _TellsItself, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model.weight.sum().backward()
        optimizer.step()

    model, optimizer, session = attached()
    with session:
        step(model, optimizer)
        step(model, optimizer)
        model.hidden[0] = nn.Parameter(torch.full((2,), 7.0))
        step(model, optimizer)
    model, optimizer, session = attached()
    with session:
        assert session.resume().consistent
        assert model.hidden[0].tolist() == [7.0, 7.0]
    assert tensors_now(nn.Sequential(_TellsBuffers()), []) is None


def test_tensors_of_subclasses_are_asked_every_time() -> None:
    class Special(torch.Tensor):
        pass

    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(3).as_subclass(Special))
    assert tensors_now(model, []) is None
    model.weight = nn.Parameter(torch.ones(3))
    before = tensors_now(model, [])
    assert before is not None
    assert before.hold()
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    assert tensors_now(model, []) is None


def test_a_lazy_conjugate_is_another_tensor() -> None:
    model = nn.Module()
    model.z = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    before = tensors_now(model, [])
    assert before is not None
    assert before.hold()
    model.z.data = model.z.data.conj()
    assert not before.hold()


def test_what_failed_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    adapter = TorchAdapter.build(training.model, [training.optimizer])
    adapter.groups()
    _replace_its_data(training)
    with monkeypatch.context() as patch:
        patch.setattr(adapter, "_new_groups", lambda **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            adapter.groups()
    groups = {group.name: group for group in adapter.groups()}
    assert groups["0.weight"].tensors[""].data_ptr() == training.model[0].weight.data_ptr()


@pytest.mark.parametrize("change", [_replace_its_data, _load_the_optimizer])
def test_what_was_replaced_is_saved(change: Change, tmp_path: Path) -> None:
    training = Training()
    options = {"interval": 1, "fraction": 1.0, "daemon": False}
    with scarctl.attach(
        training.model, training.optimizer, store=tmp_path / "store", **grouped(**options)
    ) as session:
        for _ in range(3):
            training.step()
        change(training)
        for _ in range(3):
            training.step()
        drained([session])
    again = Training()
    with scarctl.attach(
        again.model, again.optimizer, store=tmp_path / "store", **grouped(**options)
    ) as session:
        assert session.resume().consistent
        for a, b in zip(_values(training), _values(again), strict=True):
            np.testing.assert_array_equal(a, b)


def _values(t: Training) -> list[np.ndarray]:
    slots = [s for p in t.model.parameters() for s in t.optimizer.state[p].values()]
    return [x.detach().numpy() for x in [*t.model.state_dict().values(), *slots]]
