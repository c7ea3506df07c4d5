"""Provide programs whose loader, sampler or loop counts the epochs itself."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler

from tests.loops.rig import EPOCHS, PER_EPOCH, Digits, Run, net, train


def distributed(run: Run, *, ours: bool = True, epochs: bool = True) -> None:
    """Use a `DistributedSampler`, which draws its order from its own seed and the number of the epoch."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    data = Digits(8 * PER_EPOCH, noise=True)
    sampler = DistributedSampler(data, num_replicas=2, rank=1, seed=3)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    session = run.attach(model, optimizer)
    step = run.resume()
    by_hand = range(step // PER_EPOCH, EPOCHS)
    for epoch in session.epochs(EPOCHS) if ours and epochs else by_hand:
        sampler.set_epoch(epoch)
        for batch in session.batches(loader) if ours else loader:
            train(model, optimizer, batch)
            run.iterated()


def repeated(run: Run, *, schedule: bool) -> None:
    """Call `session.batches` once per epoch, but count the epochs by hand."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = StepLR(optimizer, 1, 0.7)
    loader = DataLoader(Digits(), batch_size=4, shuffle=True)
    session = run.attach(model, optimizer, schedulers=scheduler)
    step = run.resume()
    for _ in range(step // PER_EPOCH, EPOCHS):
        for batch in session.batches(loader):
            train(model, optimizer, batch)
            run.iterated()
        if schedule:
            scheduler.step()


def stateful(run: Run, *, ours: bool = True, workers: int = 0) -> None:
    """Use torchdata's loader, which has its own state. By hand, that state is in extras."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    loader: Any = StatefulDataLoader(Digits(noise=True), batch_size=4, shuffle=True, num_workers=workers)
    at = {"epoch": 0}
    session = run.attach(model, optimizer, extras={} if ours else {"loader": loader, "at": at})
    run.resume()
    # If saved with the last batch of an epoch, the loader has nothing left of that epoch: a count by steps
    # would be wrong.
    for epoch in session.epochs(EPOCHS) if ours else range(at["epoch"], EPOCHS):
        at["epoch"] = epoch
        for batch in session.batches(loader) if ours else loader:
            train(model, optimizer, batch)
            run.iterated()
