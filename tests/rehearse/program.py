"""Programs to rehearse: `program.py NAME STORE`. None of them knows that it is rehearsed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import scarctl

STEPS = 30


def loader() -> DataLoader[Any]:
    data = TensorDataset(torch.randn(24, 4), torch.randn(24, 2))
    return DataLoader(data, 4, shuffle=True)


def model_of() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 2))


def train(
    store: str,
    change: Callable[[Any, int], None] = lambda *_: None,
    *,
    carries: float = 0.0,
    **given: Any,
) -> None:
    """Train in a loop that continues bit for bit, except for what `change` does before each step.

    carries: the share of the batch before that is added to each batch.
    """
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.8)
    batches = loader()
    session = scarctl.attach(model, optimizer, store=store, schedulers=schedule, **given)
    session.resume()
    count, carried = 0, torch.zeros(4)
    for _ in session.epochs(STEPS):
        for x, y in session.batches(batches):
            count += 1
            loss = mse_loss(model(x + carried), y)
            carried = carries * x
            optimizer.zero_grad()
            loss.backward()
            change(optimizer, count)
            optimizer.step()
            schedule.step()
    session.close()
    Path(store).with_name("after").write_text("what comes after the loop")


def good(store: str) -> None:
    """Continue bit for bit; the options in the code must have no effect."""
    train(store, settings=scarctl.Settings(arena_dir=os.path.dirname(store), max_bandwidth=1e6, grace="20s"))


def unsaved(store: str) -> None:
    """Clip by a running mean that nobody saves."""
    means: list[float] = [1.0]

    def change(optimizer: Any, count: int) -> None:
        gradient = optimizer.param_groups[0]["params"][0].grad
        means[0] = 0.9 * means[0] + 0.1 * float(gradient.norm())
        gradient.mul_(means[0])

    train(store, change)


def unseeded(store: str) -> None:
    """Add noise from a generator that no seed sets."""
    noise = torch.Generator()
    noise.seed()

    def change(optimizer: Any, count: int) -> None:
        gradient = optimizer.param_groups[0]["params"][0].grad
        gradient.add_(torch.randn(gradient.shape, generator=noise), alpha=1e-3)

    train(store, change)


def fell_back(store: str) -> None:
    """Set the learning rate by a count that begins anew in a restart."""

    def change(optimizer: Any, count: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.05 * 0.9**count

    train(store, change)


def carried(store: str) -> None:
    """Carry a part of each batch over to the next one, in a variable that nobody saves."""
    train(store, carries=0.1)


def attributes(store: str) -> None:
    """Scale the loss by an attribute of a LightningModule, which nobody saves."""
    from lightning.pytorch import LightningModule, Trainer

    from scarctl_adapters.lightning import ScarCallback

    class Scales(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.scale = model_of(), 1.0

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            self.scale *= 0.9
            return self.scale * mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.net.parameters(), lr=0.05)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(max_steps=500, accelerator="cpu", callbacks=[ScarCallback(store=store)], **quiet)
    trainer.fit(Scales(), loader())


def again(store: str) -> None:
    """Give each start a store of its own."""
    train(f"{store}-{os.getpid()}")


def layers(store: str) -> None:
    """Train two models, each with a session of its own."""
    torch.manual_seed(0)
    models = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    sessions = [
        scarctl.attach(model, optimizer, store=f"{store}-{number}")
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True))
    ]
    start = min([session.resume().step for session in sessions])
    for step in range(start, 6 * STEPS):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()


def ranks(store: str) -> None:
    """Train as one of several ranks."""
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model_of())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = loader()
    with scarctl.attach(model, optimizer, store=store) as session:
        session.resume()
        for _ in session.epochs(STEPS):
            for x, y in session.batches(batches):
                optimizer.zero_grad()
                mse_loss(model(x), y).backward()
                optimizer.step()


def short(store: str) -> None:
    """Have fewer steps than are rehearsed."""
    global STEPS
    STEPS = 1
    train(store)


def stubborn(store: str) -> None:
    """Ignore SIGTERM."""
    import signal

    signal.signal(signal.SIGTERM, lambda *_: None)
    train(store)


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](sys.argv[2])
