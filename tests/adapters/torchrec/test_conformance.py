"""Run the published suite in one process, with tables that FBGEMM trains in the backward pass."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import scarctl
from scarctl.testing import AdapterConformance, Training, Visit

pytest.importorskip("torchrec", reason="TorchRec is not installed here: `make frameworks`")

from tests.adapters.torchrec import models


@pytest.fixture(autouse=True, scope="module")
def group_is_ended() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class TorchRecTraining(Training):
    """Do a forward pass, a backward pass, and a step of all optimizers as TorchRec combines them."""

    dense = True

    def __init__(self, variant: str) -> None:
        random.seed(1)
        np.random.seed(2)
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        width = 4 if variant == "changed" else 3
        self.model, self.optimizer = models.build("table", width=width, dense=self.dense)
        torch.manual_seed(3)
        self.backwards = 3 if variant == "accumulation" else 1
        self.position = {"batch": 0}

    def run(
        self, store: Path, until: int, visit: Visit, *, resume: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        extras = {"position": self.position}
        with scarctl.attach(self.model, self.optimizer, store=store, extras=extras, **options) as session:
            start = session.resume(**resume).step
            visit(session)
            for _ in range(start, until):
                self.step()
                visit(session)

    def step(self) -> None:
        self.optimizer.zero_grad()
        for _ in range(self.backwards):
            self.position["batch"] += 1
            noise = random.random() + np.random.random()
            (self.model(models.batch(self.position["batch"])) * torch.rand(()) * noise).sum().backward()
        self.optimizer.step()
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9

    def values(self) -> Mapping[str, Any]:
        return models.local_values(self.model, self.optimizer)

    def extras(self) -> Mapping[str, Any]:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return {"position": self.position, "rates": rates}


class TestTorchRec(AdapterConformance):
    variants = frozenset({"accumulation"})

    def training(self, variant: str = "") -> Training:
        return TorchRecTraining(variant)


class FusedTraining(TorchRecTraining):
    """Without any other optimizer the backward pass ends an iteration."""

    dense = False


class TestFusedOnly(AdapterConformance):
    def training(self, variant: str = "") -> Training:
        return FusedTraining(variant)
