"""Provide programs with habits that no example teaches, but that people add to a working loop."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader

from tests.loops.rig import EPOCHS, PER_EPOCH, Digits, Run, evaluate, net, train


def shuffled(**options: Any) -> DataLoader[Any]:
    return DataLoader(Digits(noise=True), **{"batch_size": 4, "shuffle": True, **options})


def compiled(run: Run, *, step: bool) -> None:
    """Compile the model, or forward, backward and step together."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    session = run.attach(model, optimizer)
    run.resume()
    fast = torch.compile(model, backend="eager")

    def together(batch: Any) -> None:
        train(model, optimizer, batch)

    if step:
        together = torch.compile(together, backend="eager")
    for _ in session.epochs(EPOCHS):
        for batch in session.batches(shuffled()):
            if step:
                together(batch)
            else:
                train(fast, optimizer, batch)
            run.iterated()


def no_sync(run: Run) -> None:
    """Accumulate in `no_sync` of DistributedDataParallel."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    plain = net()
    model = nn.parallel.DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(model.parameters())
    session = run.attach(model, optimizer)
    run.resume()
    loader = DataLoader(Digits(40, noise=True), batch_size=4, shuffle=True)
    for _ in session.epochs(EPOCHS):
        for x, y in session.batches(loader):
            last = session.batch % 2 == 1
            with contextlib.nullcontext() if last else model.no_sync():
                functional.cross_entropy(model(x), y).backward()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                run.iterated()
    torch.distributed.destroy_process_group()


def closure(run: Run, *, kind: Any, **options: Any) -> None:
    """Let the optimizer call the loss."""
    model = net()
    optimizer = kind(model.parameters(), **options)
    session = run.attach(model, optimizer)
    run.resume()
    for _ in session.epochs(EPOCHS):
        for x, y in session.batches(shuffled()):

            def loss(x: Any = x, y: Any = y) -> Any:
                optimizer.zero_grad()
                found = functional.cross_entropy(model(x), y)
                found.backward()
                return found

            optimizer.step(loss)
            run.iterated()


def swapped(run: Run) -> None:
    """Copy an average in for an evaluation in the middle of every epoch, and the weights back afterwards."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    average = copy.deepcopy(model)
    session = run.attach(model, optimizer, extras={"average": average})
    run.resume()
    for _ in session.epochs(EPOCHS):
        for batch in session.batches(shuffled()):
            train(model, optimizer, batch)
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.1)
                if session.batch % 2 == 0:
                    kept = [p.clone() for p in model.parameters()]
                    for parameter, mean in zip(model.parameters(), average.parameters(), strict=True):
                        parameter.copy_(mean)
                    evaluate(model)
                    for parameter, before in zip(model.parameters(), kept, strict=True):
                        parameter.copy_(before)
            run.iterated()
    run._models.append(average)


def loaded(run: Run) -> None:
    """Load weights in the middle of a run, as when a lottery ticket is rewound."""
    model = net()
    first = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    session = run.attach(model, optimizer)
    run.resume()
    for epoch in session.epochs(EPOCHS):
        if epoch == 1:
            model.load_state_dict(first)
        for batch in session.batches(shuffled()):
            train(model, optimizer, batch)
            run.iterated()


def scaled(run: Run) -> None:
    """Write weights at the beginning of each epoch through `.data`, which torch does not count."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    session = run.attach(model, optimizer)
    run.resume()
    for _ in session.epochs(EPOCHS):
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
        for batch in session.batches(shuffled()):
            train(model, optimizer, batch)
            run.iterated()


def reordered(run: Run) -> None:
    """Shuffle an order, an array in extras, in place at the beginning of each epoch."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state, rng, data = {"order": np.arange(4 * PER_EPOCH)}, np.random.default_rng(3), Digits()
    session = run.attach(model, optimizer, extras={"state": state, "rng": rng})
    run.resume()
    for _ in session.epochs(EPOCHS):
        rng.shuffle(state["order"])
        for number in session.batches(range(PER_EPOCH)):
            ids = state["order"][4 * number : 4 * number + 4]
            train(model, optimizer, (data.x[ids], data.y[ids]))
            run.iterated()


def critics(run: Run, *, wrong: bool = False) -> None:
    """Train WGAN: three steps of the critic for one of the generator. wrong: attached in the other order."""
    torch.manual_seed(1)
    critic, generator = nn.Linear(8, 1), nn.Linear(4, 8)
    optimizers = [torch.optim.RMSprop(m.parameters(), lr=0.01) for m in (critic, generator)]
    session = run.attach(nn.ModuleList([critic, generator]), optimizers[::-1] if wrong else optimizers)
    run.resume()
    loader = DataLoader(Digits(60 if not wrong else 20, noise=True), batch_size=4, shuffle=True)
    for _ in session.epochs(EPOCHS):
        for x, _ in session.batches(loader):
            optimizers[0].zero_grad()
            (critic(generator(torch.randn(4, 4)).detach()).mean() - critic(x).mean()).backward()
            optimizers[0].step()
            if not wrong and session.batch % 3 < 2:
                continue
            optimizers[1].zero_grad()
            (-critic(generator(torch.randn(4, 4))).mean()).backward()
            optimizers[1].step()
            run.iterated()


def patched(run: Run) -> None:
    """Replace `optimizer.step` by a function that calls it."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = CosineAnnealingLR(optimizer, 20)
    inner = optimizer.step

    def step(*args: Any, **named: Any) -> Any:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        return inner(*args, **named)

    optimizer.step = step  # type: ignore[method-assign]
    session = run.attach(model, optimizer, schedulers=scheduler)
    run.resume()
    for _ in session.epochs(EPOCHS):
        for batch in session.batches(shuffled()):
            train(model, optimizer, batch)
            scheduler.step()
            run.iterated()


def swa(run: Run) -> None:
    """Average the weights of the last epochs with a schedule of their own, and measure batch norm at the end."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = AveragedModel(model)
    schedules = [StepLR(optimizer, 1, 0.7), SWALR(optimizer, swa_lr=0.05)]
    session = run.attach(model, optimizer, schedulers=schedules, extras={"average": average})
    run.resume()
    for epoch in session.epochs(EPOCHS):
        for batch in session.batches(shuffled()):
            train(model, optimizer, batch)
            run.iterated()
        if epoch >= 1:
            average.update_parameters(model)
        schedules[epoch >= 1].step()
    update_bn(shuffled(), average)
    run._models.append(average)


def rates(run: Run) -> None:
    """Write a learning rate into param_groups at each step."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    session = run.attach(model, optimizer)
    run.resume()
    for _ in session.epochs(EPOCHS):
        for batch in session.batches(shuffled()):
            train(model, optimizer, batch)
            optimizer.param_groups[0]["lr"] *= 0.9
            run.iterated()


def clipped(run: Run) -> None:
    """Clip weights through `.data` after the step."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    session = run.attach(model, optimizer)
    run.resume()
    for _ in session.epochs(EPOCHS):
        for batch in session.batches(shuffled()):
            train(model, optimizer, batch)
            for parameter in model.parameters():
                parameter.data.clamp_(-0.1, 0.1)
            run.iterated()


def early_schedule(run: Run) -> None:
    """Change a schedule and a meter at the beginning of an epoch."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = StepLR(optimizer, 1, 0.7)
    meter = {"loss": 0.0, "epochs": 0}
    session = run.attach(model, optimizer, schedulers=scheduler, extras={"meter": meter})
    run.resume()
    for epoch in session.epochs(EPOCHS):
        if epoch:
            scheduler.step()
        meter.update(loss=0.0, epochs=meter["epochs"] + 1)
        for x, y in session.batches(shuffled()):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            (loss * (1 + meter["loss"] * meter["epochs"])).backward()
            meter["loss"] = 0.9 * meter["loss"] + 0.1 * float(loss)
            optimizer.step()
            run.iterated()


def counted(run: Run, *, numbered: bool) -> None:
    """Decide by the number of the batch."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    session = run.attach(model, optimizer)
    run.resume()
    for _ in session.epochs(EPOCHS):
        batches = session.batches(shuffled())
        for number, batch in ((session.batch, b) for b in batches) if numbered else enumerate(batches):
            optimizer.param_groups[0]["lr"] = 0.5 / (1 + number)
            train(model, optimizer, batch)
            run.iterated()


def alternating(run: Run) -> None:
    """Use two optimizers, only one of which steps per batch; the last one ends an iteration."""
    model = net()
    optimizers = [
        torch.optim.Adam(model[0].parameters(), lr=0.01),
        torch.optim.SGD(model[3].parameters(), lr=0.1),
    ]
    session = run.attach(model, optimizers)
    run.resume()
    for _ in session.epochs(EPOCHS):
        for batch in session.batches(DataLoader(Digits(40), batch_size=4, shuffle=True)):
            train(model, optimizers[session.batch % 2], batch)
            run.iterated()


HABITS = {
    "schedule at the beginning": early_schedule,
    "enumerated": lambda run: counted(run, numbered=False),
    "numbered": lambda run: counted(run, numbered=True),
    "compiled": lambda run: compiled(run, step=False),
    "compiled step": lambda run: compiled(run, step=True),
    "no_sync": no_sync,
    "closure, Adam": lambda run: closure(run, kind=torch.optim.Adam),
    "closure, LBFGS": lambda run: closure(run, kind=torch.optim.LBFGS, max_iter=3),
    "swapped": swapped,
    "loaded": loaded,
    "scaled through .data": scaled,
    "shuffled in extras": reordered,
    "critics": critics,
    "wrong order": lambda run: critics(run, wrong=True),
    "patched step": patched,
    "swa": swa,
    "rates by hand": rates,
    "clipped": clipped,
    "alternating": alternating,
}
