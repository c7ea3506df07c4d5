"""Provide programs that turn in mid-run: they retry, begin again, untie, or read other data."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import scarctl
from tests.loops.habits import shuffled
from tests.loops.rig import EPOCHS, STEPS, Digits, Run, by_step, net, train


def across(run: Run) -> None:
    """Take a step every three batches, counted over the ends of epochs."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    session = run.attach(model, optimizer)
    run.resume()
    count = 0
    for _ in session.epochs(3 * EPOCHS):
        for x, y in session.batches(shuffled()):
            functional.cross_entropy(model(x), y).backward()
            count += 1
            if count % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
                run.iterated()


def retried(run: Run) -> None:
    """Undo a step whose loss is too large, and take it again with half of the rate."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    session = run.attach(model, optimizer)
    run.resume()
    for _ in session.epochs(EPOCHS):
        for number, batch in enumerate(session.batches(shuffled())):
            before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            train(model, optimizer, batch)
            if number in (1, 4):
                model.load_state_dict(before[0])
                optimizer.load_state_dict(before[1])
                optimizer.param_groups[0]["lr"] /= 2
                train(model, optimizer, batch)
            run.iterated()


def range_test(run: Run) -> None:
    """Find the learning rate by some steps with growing ones, then put all back and train."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session = run.attach(model, optimizer)
    if run.resume() == 0:
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        for number in range(3):
            optimizer.param_groups[0]["lr"] = 0.01 * 2**number
            train(model, optimizer, by_step(number))
        model.load_state_dict(before[0])
        optimizer.load_state_dict(before[1])
        optimizer.param_groups[0]["lr"] = 0.05
    for _ in session.epochs(EPOCHS):
        for batch in session.batches(shuffled()):
            train(model, optimizer, batch)
            run.iterated()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.into, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.out.weight = self.into.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.into(x)))[:, :2]  # type: ignore[no-any-return]


def untied(run: Run) -> None:
    """Untie two weights as the second epoch begins, and give the new one to the optimizer."""
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters())
    session = run.attach(model, optimizer)
    run.resume()
    for epoch in session.epochs(EPOCHS):
        if epoch == 1:
            model.out.weight = nn.Parameter(model.into.weight.detach().clone())
            optimizer.add_param_group({"params": [model.out.weight]})
        for batch in session.batches(shuffled()):
            train(model, optimizer, batch)
            run.iterated()


def default_dtype(run: Run) -> None:
    """Change torch's default dtype between the model and the loop."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    session = run.attach(model, optimizer)
    torch.set_default_dtype(torch.float64)
    run.resume()
    for _ in session.epochs(EPOCHS):
        for x, y in session.batches(shuffled()):
            train(model, optimizer, (x.float() + 0.1 * torch.rand(8).float(), y))
            run.iterated()
    torch.set_default_dtype(torch.float32)


def swapped_loader(run: Run) -> None:
    """Leave a loader in the middle of an epoch, and read another one to its end."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    one, other = (
        DataLoader(Digits(), batch_size=4, shuffle=True),
        DataLoader(Digits(12), batch_size=4, shuffle=True),
    )
    session = run.attach(model, optimizer)
    run.resume()
    for _ in session.epochs(EPOCHS):
        for loader in (one, other):
            for batch in session.batches(loader):
                train(model, optimizer, batch)
                run.iterated()
                if loader is one and session.batch == 2:
                    break


def cycled(run: Run) -> None:
    """Read the batches of the first pass again and again."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    session = run.attach(model, optimizer)
    run.resume()
    for batch in session.batches(itertools.cycle(shuffled())):
        if session.head_step >= STEPS:
            break
        train(model, optimizer, batch)
        run.iterated()


class Harder(Digits):
    """Becomes harder with each item that was read."""

    def __init__(self) -> None:
        super().__init__()
        self.read = 0

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        x, y = super().__getitem__(index)
        return x * (1 + self.read / 100), y


def counting(run: Run) -> None:
    """Use a dataset that counts the items that were read."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    session = run.attach(model, optimizer)
    run.resume()
    loader = DataLoader(Harder(), batch_size=4, shuffle=True)
    for _ in session.epochs(EPOCHS):
        for batch in session.batches(loader):
            train(model, optimizer, batch)
            run.iterated()


def two_sessions(run: Run) -> None:
    """Train two models alternately, each with a session and a store of its own."""
    models = [net(), net()]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    session = run.attach(models[0], optimizers[0])
    other = scarctl.attach(models[1], optimizers[1], store=f"{run._store}-other", interval=1)
    run._models.append(models[1])
    run.resume()
    other.resume()
    with other:
        for _ in session.epochs(EPOCHS):
            for batch in session.batches(shuffled()):
                train(models[1], optimizers[1], batch)
                train(models[0], optimizers[0], batch)
                run.iterated()


def reversed_groups(run: Run) -> None:
    """Reverse the order of the optimizer's parameters as the second epoch begins."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    session = run.attach(model, optimizer)
    run.resume()
    for epoch in session.epochs(EPOCHS):
        if epoch == 1:
            optimizer.param_groups[0]["params"].reverse()
        for batch in session.batches(shuffled()):
            train(model, optimizer, batch)
            run.iterated()


TURNS: dict[str, Callable[[Run], None]] = {
    "accumulation over epochs": across,
    "retried": retried,
    "range test": range_test,
    "untied": untied,
    "default dtype": default_dtype,
    "swapped loader": swapped_loader,
    "cycled": cycled,
    "counting": counting,
    "two sessions": two_sessions,
    "reversed parameters": reversed_groups,
}
