"""Provide programs that depend on more than the model, the optimizer and the loader's order."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Sampler

from tests.loops.habits import shuffled
from tests.loops.rig import EPOCHS, Digits, Run, net, train


def frozen(run: Run, *, at: int, every: bool) -> None:
    """Freeze a layer from an epoch on. every: at the beginning of each epoch, not once."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = run.attach(model, optimizer)
    run.resume()
    for epoch in session.epochs(EPOCHS):
        if epoch == at or (every and epoch > at):
            for parameter in model[0].parameters():
                parameter.requires_grad_(False)
        for batch in session.batches(shuffled()):
            train(model, optimizer, batch)
            run.iterated()


def dropped(run: Run) -> None:
    """Turn dropout down once."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    session = run.attach(model, optimizer)
    run.resume()
    for epoch in session.epochs(EPOCHS):
        if epoch == 0:
            model[1].p = 0.1  # type: ignore[assignment]
        for batch in session.batches(shuffled()):
            train(model, optimizer, batch)
            run.iterated()


def other_size(run: Run, **options: Any) -> None:
    """Resume with another batch size, or other data."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    session = run.attach(model, optimizer)
    step = run.resume()
    given = options if step else {}
    loader = DataLoader(
        given.pop("data", None) or Digits(noise=True), **{"batch_size": 4, "shuffle": True, **given}
    )
    for _ in session.epochs(EPOCHS):
        for batch in session.batches(loader):
            train(model, optimizer, batch)
            run.iterated()


class Own(Sampler[int]):
    """Draws an order from a generator of its own."""

    def __init__(self, size: int) -> None:
        self.size, self.rng = size, random.Random(3)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.size))
        self.rng.shuffle(order)
        yield from order


class Augmented(Digits):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(3)

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + torch.from_numpy(self.rng.standard_normal(8)).float(), y


def own(run: Run, *, sampler: bool) -> None:
    """Use a sampler or a dataset with a generator that the loader does not know."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    session = run.attach(model, optimizer)
    run.resume()
    loader: Any = (
        DataLoader(Digits(), batch_size=4, sampler=Own(20))
        if sampler
        else DataLoader(Augmented(), batch_size=4, shuffle=True)
    )
    for _ in session.epochs(EPOCHS):
        for batch in session.batches(loader):
            train(model, optimizer, batch)
            run.iterated()


class Lazy(Digits):
    """Makes its generator with the first item; another generator without a state is the system's."""

    def __init__(self) -> None:
        super().__init__()
        self.system = random.SystemRandom()

    def __getitem__(self, index: int) -> Any:
        if not hasattr(self, "rng"):
            self.rng = np.random.default_rng(3)
        x, y = super().__getitem__(index)
        return x + torch.from_numpy(self.rng.standard_normal(8)).float(), y


def lazy(run: Run) -> None:
    """Use a dataset that makes its generator when it is first read."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    session = run.attach(model, optimizer)
    run.resume()
    loader = DataLoader(Lazy(), batch_size=4, shuffle=True)
    for _ in session.epochs(EPOCHS):
        for batch in session.batches(loader):
            train(model, optimizer, batch)
            run.iterated()


def cleared(run: Run) -> None:
    """Use an optimizer that begins each epoch with an empty state."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    session = run.attach(model, optimizer)
    run.resume()
    for _ in session.epochs(EPOCHS):
        optimizer.state.clear()
        for batch in session.batches(shuffled()):
            train(model, optimizer, batch)
            run.iterated()


def carried(run: Run, *, scale: float) -> None:
    """Scale gradients, and never set them to zero."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = run.attach(model, optimizer)
    run.resume()
    for _ in session.epochs(EPOCHS):
        for x, y in session.batches(shuffled()):
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            run.iterated()


def target(run: Run, *, extras: bool = False) -> None:
    """Copy a target network from the model now and then."""
    model = net()
    goal = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    session = run.attach(model, optimizer, extras={"goal": goal} if extras else {})
    run.resume()
    for _ in session.epochs(EPOCHS):
        for x, y in session.batches(shuffled()):
            with torch.no_grad():
                wanted = goal(x)
            optimizer.zero_grad()
            (functional.mse_loss(model(x), wanted) + functional.cross_entropy(model(x), y)).backward()
            optimizer.step()
            if session.head_step % 3 == 0:
                goal.load_state_dict(model.state_dict())
            run.iterated()


def added(run: Run) -> None:
    """Add parameters to the optimizer later, when a layer is no longer frozen."""
    model = net()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.Adam(model[3].parameters(), lr=0.01)
    session = run.attach(model, optimizer)
    run.resume()
    for epoch in session.epochs(EPOCHS):
        if epoch == 1:
            for parameter in model[0].parameters():
                parameter.requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters())})
        for batch in session.batches(shuffled()):
            train(model, optimizer, batch)
            run.iterated()


OVERSIGHTS = {
    "frozen": lambda run: frozen(run, at=1, every=True),
    "frozen once": lambda run: frozen(run, at=0, every=False),
    "dropout changed once": dropped,
    "other batch size": lambda run: other_size(run, batch_size=2),
    "other data": lambda run: other_size(run, data=Digits(24)),
    "own sampler": lambda run: own(run, sampler=True),
    "own augmentation": lambda run: own(run, sampler=False),
    "lazy augmentation": lazy,
    "cleared": cleared,
    "carried gradients": lambda run: carried(run, scale=1.0),
    "scaled gradients": lambda run: carried(run, scale=0.5),
    "target": target,
    "target in extras": lambda run: target(run, extras=True),
    "added later": added,
}
