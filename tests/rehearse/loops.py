"""Small training programs, each the way that people write it, and with `session.epochs` and `session.batches`:

python -m tests.rehearse.loops NAME STORE
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import scarctl

EPOCHS, PER_EPOCH = 3, 5
STEPS = EPOCHS * PER_EPOCH


class Run:
    """The session of a program."""

    def __init__(self, store: str) -> None:
        self._store = store

    def attach(self, model: nn.Module, optimizer: Any, **options: Any) -> scarctl.Session:
        self.session = scarctl.attach(model, optimizer, store=self._store, **options)
        return self.session

    def resume(self) -> int:
        return self.session.resume().step


class Digits(Dataset[Any]):
    """Random features. noise: drawn again each time, as by an augmentation."""

    def __init__(self, size: int = 4 * PER_EPOCH, *, noise: bool = False) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x, self.y = torch.rand(size, 8, generator=generator), torch.arange(size) % 2
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        x = self.x[index]
        return (x + 0.1 * torch.rand(8) if self.noise else x), self.y[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(7)
        for index in range(4 * PER_EPOCH):
            yield torch.rand(8, generator=generator), index % 2


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 2))


def train(model: nn.Module, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad()
    functional.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        for x, _ in DataLoader(Digits(8), batch_size=4, shuffle=True):
            model(x)
    model.train()


def by_step(step: int) -> Any:
    """Return a batch that is a function of the step."""
    generator = torch.Generator().manual_seed(step)
    return torch.rand(4, 8, generator=generator), torch.randint(0, 2, (4,), generator=generator)


# -- loops over a DataLoader ------------------------------------------------------------------------------------------


def mnist(run: Run, **options: Any) -> None:
    """Train as pytorch/examples mnist: dropout, a shuffled DataLoader, a schedule and an evaluation per epoch."""
    model = net()
    optimizer = torch.optim.Adadelta(model.parameters())
    scheduler = StepLR(optimizer, 1, 0.7)
    data = options.pop("data", None) or Digits()
    given = {"shuffle": not isinstance(data, IterableDataset), "batch_size": 4, **options}
    loader = DataLoader(data, **given)
    session = run.attach(model, optimizer, schedulers=scheduler)
    run.resume()
    for _ in session.epochs(EPOCHS):
        for batch in session.batches(loader):
            train(model, optimizer, batch)
        evaluate(model)
        scheduler.step()


def mnist_generator(run: Run) -> None:
    mnist(run, generator=torch.Generator().manual_seed(3))


def two_loaders(run: Run) -> None:
    """Use two loaders side by side, and a third after them, in every epoch."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    loaders = [DataLoader(Digits(8, noise=True), batch_size=4, shuffle=True) for _ in range(3)]
    session = run.attach(model, optimizer)
    run.resume()
    for _ in session.epochs(EPOCHS):
        for one, other in zip(session.batches(loaders[0]), session.batches(loaders[1]), strict=True):
            train(model, optimizer, (one[0] + other[0], one[1]))
        torch.rand(3)
        for batch in session.batches(loaders[2]):
            train(model, optimizer, batch)


def early_break(run: Run) -> None:
    """End each epoch after four of five batches."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    loader = DataLoader(Digits(), batch_size=4, shuffle=True, drop_last=True)
    session = run.attach(model, optimizer)
    run.resume()
    for _ in session.epochs(EPOCHS):
        for batch in session.batches(loader):
            train(model, optimizer, batch)
            if session.head_step % 4 == 0:
                break
        evaluate(model)


# -- loops without epochs ----------------------------------------------------------------------------------------------


def _get_batch() -> Any:
    return torch.rand(4, 8), torch.randint(0, 2, (4,))


def nanogpt(run: Run) -> None:
    """Train as nanoGPT: random batches, two per step, and a scaler."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    session = run.attach(model, optimizer, scaler=scaler)
    step = run.resume()

    def drawn() -> Iterator[Any]:
        while True:
            yield _get_batch()

    batches = session.batches(drawn())
    while step < STEPS:
        for _ in range(2):
            batch = next(batches)
            loss = functional.cross_entropy(model(batch[0]), batch[1]) / 2
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        step += 1


# -- loaders that count the epochs themselves -----------------------------------------------------------------------


def distributed(run: Run) -> None:
    """Use a `DistributedSampler`, which draws its order from its own seed and the number of the epoch."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    data = Digits(8 * PER_EPOCH, noise=True)
    sampler = DistributedSampler(data, num_replicas=2, rank=1, seed=3)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    session = run.attach(model, optimizer)
    run.resume()
    for epoch in session.epochs(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in session.batches(loader):
            train(model, optimizer, batch)


def stateful(run: Run, *, workers: int = 0) -> None:
    """Use torchdata's loader, which has its own state."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    loader: Any = StatefulDataLoader(Digits(noise=True), batch_size=4, shuffle=True, num_workers=workers)
    session = run.attach(model, optimizer)
    run.resume()
    for _ in session.epochs(EPOCHS):
        for batch in session.batches(loader):
            train(model, optimizer, batch)


# -- what changes after the step ---------------------------------------------------------------------------------------


def skipping(run: Run) -> None:
    """Let a gradient scaler skip the steps of some batches."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    session = run.attach(model, optimizer, scaler=scaler)
    run.resume()
    for number in session.batches(range(STEPS)):
        x, y = by_step(number)
        loss = functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss * torch.inf if number in (3, 6, 7) else loss).backward()
        scaler.step(optimizer)
        scaler.update()


Program = Callable[[Run], None]
PROGRAMS: dict[str, Program] = {
    "mnist": mnist,
    "mnist, 2 workers": lambda run: mnist(run, data=Digits(noise=True), num_workers=2),
    "mnist, augmented": lambda run: mnist(run, data=Digits(noise=True)),
    "mnist, generator": mnist_generator,
    "mnist, stream": lambda run: mnist(run, data=Stream()),
    "distributed sampler": distributed,
    "two loaders": two_loaders,
    "early break": early_break,
    "nanogpt": nanogpt,
    "scaler": skipping,
}
TORCHDATA: dict[str, Program] = {
    "stateful loader": stateful,
    "stateful loader, 2 workers": lambda run: stateful(run, workers=2),
}
PROGRAMS |= TORCHDATA if find_spec("torchdata") is not None else {}


def main() -> None:
    """Run a program; see the module."""
    name, store = sys.argv[1:]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    run = Run(store)
    PROGRAMS[name](run)
    run.session.close()


if __name__ == "__main__":
    main()
