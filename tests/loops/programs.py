"""Small training programs, each the way that people write it, and with `session.epochs` and `session.batches`:

    python -m tests.loops.programs NAME STORE STOP AT

STOP is none, close, SIGTERM or SIGKILL; the signal comes right after the optimizer's step AT, before the rest of the
iteration. The last line of the output is a JSON document: the digest of the parameters, the step that the run was
resumed from, whether that was exact, and why not.
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
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from tests.loops.rig import EPOCHS, PER_EPOCH, STEPS, Digits, Run, Stream, by_step, evaluate, net, train
from tests.loops.samplers import distributed, stateful

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
            run.iterated()
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
            run.iterated()
        torch.rand(3)
        for batch in session.batches(loaders[2]):
            train(model, optimizer, batch)
            run.iterated()


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
            run.iterated()
            if session.head_step % 4 == 0:
                break
        evaluate(model)


def accumulate(run: Run) -> None:
    """Take a step every two batches; the last batch of an epoch continues in the next."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    loader = DataLoader(Digits(28), batch_size=4, shuffle=True)
    session = run.attach(model, optimizer)
    run.resume()
    count = 0
    for _ in session.epochs(EPOCHS):
        for x, y in session.batches(loader):
            functional.cross_entropy(model(x), y).backward()
            count += 1
            if count % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
                run.iterated()
        count = 0
        optimizer.zero_grad()


def vae(run: Run) -> None:
    """Train as pytorch/examples vae: noise from torch.randn in the forward pass."""
    torch.manual_seed(1)

    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(8, 4), nn.Linear(2, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mean, deviation = self.encode(x).chunk(2, dim=1)
            decoded: torch.Tensor = self.decode(mean + torch.randn_like(mean) * torch.exp(0.5 * deviation))
            return decoded

    model = Vae()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(Digits(), batch_size=4, shuffle=True)
    session = run.attach(model, optimizer)
    run.resume()
    for _ in session.epochs(EPOCHS):
        for x, _ in session.batches(loader):
            optimizer.zero_grad()
            functional.mse_loss(model(x), x).backward()
            optimizer.step()
            run.iterated()


def dcgan(run: Run) -> None:
    """Train as pytorch/examples dcgan: two optimizers and noise."""
    torch.manual_seed(1)
    critic, generator = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), nn.Linear(4, 8)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (critic, generator)]
    loader = DataLoader(Digits(), batch_size=4, shuffle=True)
    session = run.attach(nn.ModuleList([critic, generator]), optimizers)
    run.resume()
    for _ in session.epochs(EPOCHS):
        for x, _ in session.batches(loader):
            optimizers[0].zero_grad()
            fake = generator(torch.randn(4, 4))
            (critic(fake.detach()).mean() - critic(x).mean()).backward()
            optimizers[0].step()
            optimizers[1].zero_grad()
            (-critic(fake).mean()).backward()
            optimizers[1].step()
            run.iterated()


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
            run.iterated()


# -- loops without epochs ----------------------------------------------------------------------------------------------


def mingpt(run: Run) -> None:
    """Train as minGPT: an endless iterator over samples with replacement."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    data = Digits()
    sampler = RandomSampler(data, replacement=True, num_samples=10**6)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    session = run.attach(model, optimizer)
    if run.resume() >= STEPS:
        return  # a busy machine may handle a signal only when the run has ended
    for batch in session.batches(loader):
        train(model, optimizer, batch)
        run.iterated()
        if session.head_step >= STEPS:
            break


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
        run.iterated()


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
            run.iterated()
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
        run.iterated()


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
        run.iterated()
    run._models.append(ema)


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
        run.iterated()


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
    "accumulation": accumulate,
    "one cycle": one_cycle,
    "vae": vae,
    "dcgan": dcgan,
    "words": words,
    "mingpt": mingpt,
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
    name, store, stop, at = sys.argv[1:]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    PROGRAMS[name](run := Run(store, stop, int(at)))
    run.done()


if __name__ == "__main__":
    main()
