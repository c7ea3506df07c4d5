"""Provide programs whose loader, sampler or loop counts the epochs itself."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from tests.loops.rig import EPOCHS, PER_EPOCH, Digits, Run, net, train


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
            run.iterated()


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
            run.iterated()
