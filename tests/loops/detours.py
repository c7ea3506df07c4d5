"""Programs that leave the straight way: phases, tasks, validations within an epoch, tied or reloaded weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import update_bn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.loops.habits import shuffled
from tests.loops.rig import EPOCHS, STEPS, Digits, Run, by_step, net, train


def normed() -> nn.Sequential:
    """Return a model with buffers."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 2))


class Pair(nn.Module):
    """BYOL: a target that follows the trained network after every step, its batch norm included."""

    def __init__(self) -> None:
        super().__init__()
        self.online = normed()
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.target.eval()(x)
        return functional.mse_loss(self.online(x + 0.1 * torch.rand_like(x)), wanted)

    @torch.no_grad()
    def follow(self) -> None:
        for mine, theirs in zip(self.target.parameters(), self.online.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)
        for mine, theirs in zip(self.target.buffers(), self.online.buffers(), strict=True):
            mine.copy_(theirs)


def byol(run: Run, *, ours: bool) -> None:
    model = Pair()
    optimizer = torch.optim.Adam(model.online.parameters(), lr=0.05)
    session = run.attach(model, optimizer)
    step = run.resume()
    for number in session.batches(range(STEPS)) if ours else range(step, STEPS):
        x, y = by_step(number)
        optimizer.zero_grad()
        (model(x) + functional.cross_entropy(model.online(x), y)).backward()
        optimizer.step()
        model.follow()
        run.iterated()


def reloaded(run: Run) -> None:
    """Load the best weights so far, with their batch norm, again in the middle of an epoch."""
    model = normed()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    best = copy.deepcopy(model.state_dict())
    session = run.attach(model, optimizer, extras={"best": best})
    run.resume()
    for _ in session.epochs(EPOCHS):
        for batch in session.batches(shuffled()):
            train(model, optimizer, batch)
            if session.batch == 1:
                for name, value in model.state_dict().items():
                    best[name] = value.clone()
            if session.batch == 3:
                model.load_state_dict(best)
            run.iterated()


def measured(run: Run) -> None:
    """Statistics of batch norm that are measured anew after every epoch, and in the middle of one."""
    model = normed()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    session = run.attach(model, optimizer)
    run.resume()
    for _ in session.epochs(EPOCHS):
        for batch in session.batches(shuffled()):
            train(model, optimizer, batch)
            if session.batch == 1:
                update_bn([by_step(100)[0], by_step(101)[0]], model)
            run.iterated()
        update_bn([by_step(100)[0], by_step(101)[0]], model)


def phases(run: Run) -> None:
    """Transfer learning: some epochs of the head alone, then of everything."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    session = run.attach(model, optimizer)
    run.resume()
    model[0].requires_grad_(False)
    for _ in session.epochs(1):
        for batch in session.batches(shuffled()):
            train(model, optimizer, batch)
            run.iterated()
    torch.rand(3)
    model[0].requires_grad_(True)
    for _ in session.epochs(EPOCHS):
        for batch in session.batches(shuffled()):
            train(model, optimizer, batch)
            run.iterated()


def validated(run: Run) -> None:
    """Validate in every second iteration, with data from `session.batches`, too."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    session = run.attach(model, optimizer, schedulers=plateau)
    run.resume()
    valid = DataLoader(Digits(12), batch_size=4, shuffle=True)
    for _ in session.epochs(EPOCHS):
        for batch in session.batches(shuffled()):
            train(model, optimizer, batch)
            if session.head_step % 2:
                model.eval()
                with torch.no_grad():
                    losses = [float(functional.cross_entropy(model(x), y)) for x, y in session.batches(valid)]
                model.train()
                plateau.step(sum(losses))
            run.iterated()


def tasks(run: Run) -> None:
    """Continual learning: batches of each of several tasks, both read from `session.batches`."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    session = run.attach(model, optimizer)
    run.resume()
    for task in session.batches(range(EPOCHS)):
        for x, y in session.batches(shuffled()):
            train(model, optimizer, (x + task, y))
            run.iterated()


def tied(run: Run) -> None:
    """Weights that are tied after the first epoch: the state no longer fits the store."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    session = run.attach(model, optimizer)
    run.resume()
    for epoch in session.epochs(EPOCHS):
        if epoch >= 1:
            model[2].weight = model[0].weight
        for batch in session.batches(shuffled()):
            train(model, optimizer, batch)
            run.iterated()


def rerun(run: Run) -> None:
    """Activation checkpointing: the backward pass runs the forward again, with its dropout and batch norm."""
    model = normed()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    session = run.attach(model, optimizer)
    run.resume()
    for _ in session.epochs(EPOCHS):
        for x, y in session.batches(shuffled()):
            optimizer.zero_grad()
            found = checkpoint(model, x.requires_grad_(), use_reentrant=False)
            functional.cross_entropy(found, y).backward()
            optimizer.step()
            run.iterated()


def twice(run: Run) -> None:
    """Two steps with every batch."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    session = run.attach(model, optimizer)
    run.resume()
    for _ in session.epochs(EPOCHS):
        for batch in session.batches(shuffled()):
            for _ in range(2):
                train(model, optimizer, batch)
                run.iterated()


def unlabelled(run: Run) -> None:
    """Read a second loader by hand, again and again."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    session = run.attach(model, optimizer)
    run.resume()

    def forever() -> Iterator[Any]:
        while True:
            yield from DataLoader(Digits(12), batch_size=4, shuffle=True)

    others = forever()
    for _ in session.epochs(EPOCHS):
        for x, y in session.batches(shuffled()):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            (loss + model(next(others)[0]).square().mean()).backward()
            optimizer.step()
            run.iterated()


def renewed(run: Run) -> None:
    """Draw a layer anew in the middle of an epoch, and drop its state in the optimizer."""
    model = normed()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    session = run.attach(model, optimizer)
    run.resume()
    for _ in session.epochs(EPOCHS):
        for batch in session.batches(shuffled()):
            train(model, optimizer, batch)
            if session.batch == 3:
                model[4].reset_parameters()
                model[1].reset_running_stats()
                for parameter in model[4].parameters():
                    optimizer.state.pop(parameter, None)
            run.iterated()


DETOURS = {
    "byol": lambda run: byol(run, ours=True),
    "byol by hand": lambda run: byol(run, ours=False),
    "reloaded": reloaded,
    "measured": measured,
    "phases": phases,
    "validated": validated,
    "tasks": tasks,
    "tied later": tied,
    "rerun": rerun,
    "twice": twice,
    "unlabelled": unlabelled,
    "renewed": renewed,
}
