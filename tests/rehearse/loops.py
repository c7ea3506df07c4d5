"""Small training programs, each the way that people write it, and with `session.epochs` and `session.batches`:

python -m tests.rehearse.loops NAME STORE
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
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


def one_cycle(run: Run) -> None:
    """Step a schedule per batch."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = OneCycleLR(optimizer, 0.5, total_steps=STEPS + 1)
    loader = DataLoader(Digits(noise=True), batch_size=4, shuffle=True)
    session = run.attach(model, optimizer, schedulers=scheduler)
    run.resume()
    for _ in session.epochs(EPOCHS):
        for batch in session.batches(loader):
            train(model, optimizer, batch)
            scheduler.step()


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


def words(run: Run) -> None:
    """Train as pytorch/examples word_language_model: a text in pieces, and a hidden state passed between them."""
    torch.manual_seed(1)
    text = torch.randint(0, 8, (PER_EPOCH * 3, 4), generator=torch.Generator().manual_seed(2))

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.cell, self.drop = nn.Embedding(8, 6), nn.GRU(6, 6), nn.Dropout(0.3)
            self.out = nn.Linear(6, 8)

        def forward(self, piece: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            found, hidden = self.cell(self.drop(self.embed(piece)), hidden)
            return self.out(found), hidden

    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    carried = {"hidden": torch.zeros(1, 4, 6)}
    session = run.attach(model, optimizer, extras={"carried": carried})
    run.resume()
    for _ in session.epochs(EPOCHS):
        pieces = range(0, len(text) - 1, 3)
        for start in session.batches(pieces):
            piece, target = text[start : start + 2], text[start + 1 : start + 3]
            found, hidden = model(piece, carried["hidden"])
            optimizer.zero_grad()
            functional.cross_entropy(found.flatten(0, 1), target.flatten()).backward()
            optimizer.step()
            carried["hidden"] = hidden.detach()
        evaluate_words = torch.rand(3)
        assert evaluate_words.numel() == 3


def cleanrl(run: Run) -> None:
    """Train as CleanRL: an environment with a generator of its own, and forward passes between the steps."""
    torch.manual_seed(1)
    np.random.seed(3)

    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor, self.critic = nn.Linear(4, 2), nn.Linear(4, 1)

    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.01)
    rng = np.random.default_rng(4)
    world = {"obs": rng.standard_normal(4).astype(np.float32)}
    session = run.attach(agent, optimizer, extras={"world": world, "rng": rng})
    run.resume()
    for _ in session.batches(range(STEPS)):
        kept = []
        for _ in range(3):
            obs = torch.from_numpy(world["obs"])[None]
            with torch.no_grad():
                action = torch.distributions.Categorical(logits=agent.actor(obs)).sample()
            kept.append((obs, action))
            world["obs"] = (0.5 * world["obs"] + rng.standard_normal(4)).astype(np.float32)
        np.random.shuffle(kept)  # type: ignore[arg-type]
        loss = torch.zeros(())
        for obs, action in kept:
            chosen = torch.distributions.Categorical(logits=agent.actor(obs)).log_prob(action)
            loss = (
                loss
                - (chosen * (action - agent.critic(obs).detach())).mean()
                + agent.critic(obs).square().mean()
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


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


def average(run: Run) -> None:
    """Average a model on which training depends, after the step; batches are a function of the step."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    session = run.attach(model, optimizer, extras={"ema": ema})
    run.resume()
    for number in session.batches(range(STEPS)):
        x, y = by_step(number)
        optimizer.zero_grad()
        with torch.no_grad():
            teacher = ema(x)
        (functional.cross_entropy(model(x), y) + functional.mse_loss(model(x), teacher)).backward()
        optimizer.step()
        ema.update_parameters(model)


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
    "one cycle": one_cycle,
    "words": words,
    "nanogpt": nanogpt,
    "cleanrl": cleanrl,
    "average": average,
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
