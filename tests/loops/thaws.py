"""Programs that fine-tune: layers that are thawed in mid-run, and adapters that join a frozen model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.loops.habits import shuffled
from tests.loops.rig import EPOCHS, Run, net, train

_RULES: dict[str, Any] = {"Adam": torch.optim.Adam, "SGD": torch.optim.SGD}
_RATE = 0.01


def flipped(run: Run, *, rule: str = "Adam", early: bool = False) -> None:
    """Thaw the first layer, which the optimizer has from the start, as the second epoch begins.

    early: it is frozen before `attach`, and not after it.
    """
    model = net()
    model[0].requires_grad_(not early)
    optimizer = _RULES[rule](model.parameters(), lr=_RATE)
    session = run.attach(model, optimizer)
    run.resume()
    for epoch in session.epochs(EPOCHS):
        model[0].requires_grad_(epoch >= 1)
        for batch in session.batches(shuffled()):
            train(model, optimizer, batch)
            run.iterated()


def grouped(run: Run) -> None:
    """Thaw a layer that has a param_group of its own from the start, with another rate."""
    model = net()
    groups = [{"params": model[3].parameters()}, {"params": model[0].parameters(), "lr": 0.0}]
    optimizer = torch.optim.Adam(groups, lr=_RATE)
    session = run.attach(model, optimizer)
    run.resume()
    for epoch in session.epochs(EPOCHS):
        model[0].requires_grad_(epoch >= 1)
        optimizer.param_groups[1]["lr"] = _RATE / 10 if epoch >= 1 else 0.0
        for batch in session.batches(shuffled()):
            train(model, optimizer, batch)
            run.iterated()


def seconded(run: Run, *, last: bool) -> None:
    """Thaw a layer with an optimizer of its own, which takes no step before. last: it steps after the other one."""
    model = net()
    head = torch.optim.Adam(model[3].parameters(), lr=_RATE)
    body = torch.optim.Adam(model[0].parameters(), lr=_RATE / 10)
    order = [head, body] if last else [body, head]
    session = run.attach(model, order)
    run.resume()
    for epoch in session.epochs(EPOCHS):
        model[0].requires_grad_(epoch >= 1)
        for x, y in session.batches(shuffled()):
            for optimizer in order:
                optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            for optimizer in order:
                if optimizer is head or epoch >= 1:
                    optimizer.step()
            run.iterated()


class Adapted(nn.Module):
    """A linear layer, and a product of two small matrices that is added to it (LoRA)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.on = base, True
        self.a = nn.Parameter(torch.randn(2, base.in_features) / 4)
        self.b = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base(x)
        return found + x @ self.a.t() @ self.b.t() if self.on else found


def adapted(run: Run, *, later: bool) -> None:
    """Train an adapter from the second epoch on. later: the model gets it then, and the optimizer a group for it."""
    model: Any = net()

    def adapt() -> None:
        torch.manual_seed(3)
        model[0] = Adapted(model[0])

    if not later:
        adapt()
        model[0].on = False
    optimizer = torch.optim.Adam(model.parameters(), lr=_RATE)
    session = run.attach(model, optimizer)
    run.resume()
    for epoch in session.epochs(EPOCHS):
        if epoch >= 1 and later and not isinstance(model[0], Adapted):
            adapt()
            optimizer.add_param_group({"params": [model[0].a, model[0].b]})
        if epoch >= 1:
            model[0].on = True
        for batch in session.batches(shuffled()):
            train(model, optimizer, batch)
            run.iterated()


def staged(run: Run, *, adapts: bool) -> None:
    """Train in two phases with a store each. In between the optimizer gets a group.

    adapts: of an adapter that the model gets then. Otherwise of a layer that was frozen.
    """
    model: Any = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model[3].parameters(), lr=_RATE)
    for phase, epochs in ("-head", 1), ("", EPOCHS - 1):
        if not phase and adapts:
            model[0] = Adapted(model[0])
            optimizer.add_param_group({"params": [model[0].a, model[0].b], "lr": _RATE / 10})
        elif not phase:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": _RATE / 10})
        session = run.attach(model, optimizer, phase=phase)
        run.resume()
        for _ in session.epochs(epochs):
            for batch in session.batches(shuffled()):
                train(model, optimizer, batch)
                run.iterated()
        if phase:
            session.close()


THAWS = {
    "thawed": flipped,
    "thawed, frozen early": lambda run: flipped(run, early=True),
    "thawed, frozen early, SGD": lambda run: flipped(run, rule="SGD", early=True),
    "thawed, own group": grouped,
    "thawed, first optimizer": lambda run: seconded(run, last=False),
    "thawed, last optimizer": lambda run: seconded(run, last=True),
    "thawed, own store": lambda run: staged(run, adapts=False),
    "adapter": lambda run: adapted(run, later=False),
    "adapter later": lambda run: adapted(run, later=True),
    "adapter, own store": lambda run: staged(run, adapts=True),
}
