"""Train a small loop with Accelerate, in this process.

A model with dropout, shuffled data, two batches per step, schedules that the loop steps after a step and after an
epoch, evaluation that draws random numbers, and a registered object.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR

import scarctl
from scarctl_adapters.accelerate import attach_and_resume
from tests.support.training import drain, whole_state

EXACT: dict[str, Any] = {"selection": scarctl.Selection(policy="full"), "interval": 1}
"""Attach, with every step sealed."""


class Meter:
    """An object with a state, as a user registers one."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])


class Loop:
    """A loop over epochs of 11 batches, which make 6 steps; the last step has one batch."""

    def __init__(self, seed: int = 3) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Embedding(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.25), nn.Linear(8, 16))
        data = torch.utils.data.TensorDataset(torch.arange(44) % 16, torch.arange(44) * 7 % 16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
        scheduler = CosineAnnealingLR(optimizer, T_max=40)
        self.by_epoch = ExponentialLR(optimizer, 0.9)
        self.meter = Meter()
        self.accelerator.register_for_checkpointing(self.meter, self.by_epoch)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )

    def train(self, run: Any = None, *, epochs: int = 3) -> None:
        steps = run.session.head_step if run is not None else 0
        for _ in run.epochs(epochs) if run is not None else range(epochs):
            self.model.train()
            for ids, labels in run.batches(self.loader) if run is not None else self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = nn.functional.cross_entropy(self.model(ids), labels)
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                if self.accelerator.sync_gradients:
                    steps += 1
                    self.meter.losses.append(loss.item())
                    if steps % 4 == 0:
                        torch.rand(3)  # as an evaluation does
                    assert run is None or drain(run.session)
            torch.rand(2)
            self.by_epoch.step()

    def state(self) -> dict[str, torch.Tensor]:
        """Return the complete state, to be compared bit for bit."""
        losses = torch.tensor(self.meter.losses, dtype=torch.float64)
        return {**whole_state(self.model, self.optimizer), "losses": losses}


def forget_accelerators() -> None:
    """Reset Accelerate's settings, which it keeps for the whole process."""
    for shared in (AcceleratorState, GradientState, PartialState):
        shared._reset_state()


def go(store: Path | None = None) -> tuple[dict[str, torch.Tensor], Any]:
    """Run in this process until the end. Return the state, and what the run resumed from."""
    forget_accelerators()
    loop = Loop()
    if store is None:
        loop.train()
        return loop.state(), None
    with attach_and_resume(loop.accelerator, store=store, **EXACT) as run:
        loop.train(run)
        return loop.state(), run.resumed
