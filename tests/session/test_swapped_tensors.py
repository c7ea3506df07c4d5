"""Test modules whose tensors torch replaces or swaps in mid-run, in the model and next to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import scarctl
from tests.support.training import drained

UNTIL, AT = 9, 4
DATA = torch.rand(UNTIL, 3, 4, generator=torch.Generator().manual_seed(1))
Swap = Callable[[nn.Linear], object]


def converts(layer: nn.Linear) -> None:
    layer.double().float()


def loads(layer: nn.Linear) -> None:
    layer.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()})


def assigns(layer: nn.Linear) -> None:
    layer.load_state_dict({n: value.clone() for n, value in layer.state_dict().items()}, assign=True)


def swaps(layer: nn.Linear) -> None:
    torch.utils.swap_tensors(layer.weight, nn.Parameter(layer.weight.detach().clone()))


def halves(layer: nn.Linear) -> None:
    layer.half().float()


@pytest.fixture(params=[False, True], ids=["set", "swapped"])
def swapping(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have torch set the data of a module's parameters, or swap the parameters."""
    torch.__future__.set_swap_module_params_on_conversion(request.param)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


class Loop:
    """A student that learns from a teacher which is not saved."""

    def __init__(self, store: Path) -> None:
        torch.manual_seed(0)
        self.first, self.teacher = nn.Linear(4, 8), nn.Linear(4, 4)
        self.model = nn.Sequential(self.first, nn.Tanh(), nn.Linear(8, 4))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.1)
        self.session = scarctl.attach(
            self.model, self.optimizer, store=store, interval=1, settings=scarctl.Settings(daemon=False)
        )
        self.resumed = self.session.resume()

    def train(self, until: int, of_model: Swap | None = None, of_teacher: Swap | None = None) -> None:
        for x in self.session.batches(DATA):
            if self.session.head_step == AT:
                if of_model is not None:
                    of_model(self.first)
                if of_teacher is not None:
                    of_teacher(self.teacher)
            self.optimizer.zero_grad()
            (self.model(x) - self.teacher(x).detach()).square().sum().backward()
            self.optimizer.step()
            drained([self.session])
            if self.session.head_step == until:
                break

    def values(self) -> list[float]:
        return [value for p in self.model.parameters() for value in p.detach().ravel().tolist()]


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("swap", [converts, loads, swaps])
def test_a_model_whose_tensors_are_swapped_resumes_exactly(tmp_path: Path, swap: Swap) -> None:
    undisturbed = Loop(tmp_path / "u")
    undisturbed.train(UNTIL, swap)
    undisturbed.session.close()
    first = Loop(tmp_path / "s")
    first.train(AT + 2, swap)
    assert not first.session.stats.errors
    first.session.close()
    second = Loop(tmp_path / "s")
    assert (second.resumed.step, second.resumed.consistent) == (AT + 2, True)
    second.train(UNTIL)
    assert second.values() == undisturbed.values()
    second.session.close()
