"""Run the adapters' suite with a full PyTorch loop: scheduler, data position, batch norm, dropout, other generators."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import scarctl
from scarctl.testing import AdapterConformance, Training, Visit


class Net(nn.Module):
    """A model with an embedding, batch norm, dropout, a linear layer, and the additions of a variant."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.25)
        self.out = nn.Linear(4, 5 if variant == "changed" else 3)
        self.scale: nn.Parameter | None = None
        if variant == "0-dim":
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.register_buffer("batches", torch.tensor(0))
        elif variant == "empty":
            self.nothing = nn.Parameter(torch.empty(0, 4))
            self.register_buffer("none", torch.empty(0))
        elif variant == "non-contiguous":
            self.out.weight = nn.Parameter(torch.randn(4, 3).t())
        elif variant == "tied":
            self.out = nn.Linear(4, 8)
            self.out.weight = self.embed.weight
        elif variant == "frozen":
            self.embed.weight.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.out(self.drop(self.norm(self.embed(ids))))
        return hidden if self.scale is None else hidden * self.scale


class TorchTraining(Training):
    """A loop with Adam, a scheduler and a data position; every batch draws from all three global generators."""

    def __init__(self, variant: str) -> None:
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        self.model: nn.Module = Net(variant)
        if variant == "bfloat16":
            self.model.to(torch.bfloat16)
        self.backwards = 3 if variant == "accumulation" else 1
        parameters = list(self.model.parameters())
        if variant == "several-optimizers":
            self.optimizers: list[torch.optim.Optimizer] = [
                torch.optim.SGD(parameters[:1], lr=0.1, momentum=0.9),
                torch.optim.AdamW(parameters[1:], lr=0.01),
            ]
        elif variant == "factored":
            self.optimizers = [torch.optim.Adafactor(parameters, lr=0.01)]
        else:
            self.optimizers = [torch.optim.Adam(parameters, lr=0.01)]
        self.schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in self.optimizers]
        self.position = {"batch": 0}

    def run(
        self, store: Path, until: int, visit: Visit, *, resume: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        with scarctl.attach(
            self.model,
            self.optimizers,
            store=store,
            schedulers=self.schedulers,
            extras={"position": self.position},
            **options,
        ) as session:
            start = session.resume(**resume).step
            visit(session)
            for _ in zip(range(start, until), session.batches(itertools.count()), strict=False):
                self.step()
                visit(session)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for _ in range(self.backwards):
            self.position["batch"] += 1
            ids = torch.cat([torch.randperm(8), torch.randint(0, 8, (4,))])
            (
                self.model(ids).square().mean() * random.uniform(0.5, 1.0) * np.random.uniform(0.5, 1.0)
            ).backward()
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            scheduler.step()

    def values(self) -> Mapping[str, Any]:
        found: dict[str, Any] = dict(self.model.state_dict())
        for name, parameter in self.model.named_parameters():
            for optimizer in self.optimizers:
                slots = optimizer.state.get(parameter, {})
                found |= {f"{name}/{slot}": value for slot, value in slots.items() if slot != "step"}
        return found

    def extras(self) -> Mapping[str, Any]:
        return {
            "position": self.position,
            "steps": [
                [state["step"] for state in o.state.values() if "step" in state] for o in self.optimizers
            ],
            "rates": [[group["lr"] for group in o.param_groups] for o in self.optimizers],
            "schedulers": [scheduler.last_epoch for scheduler in self.schedulers],
        }


class TestTorch(AdapterConformance):
    variants = frozenset(
        {
            "non-contiguous",
            "0-dim",
            "empty",
            "bfloat16",
            "tied",
            "frozen",
            "accumulation",
            "several-optimizers",
            *(["factored"] if hasattr(torch.optim, "Adafactor") else []),
        }
    )

    def training(self, variant: str = "") -> Training:
        return TorchTraining(variant)
