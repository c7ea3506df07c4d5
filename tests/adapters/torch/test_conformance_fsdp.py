"""Run the adapters' suite with FSDP2 in one process: every parameter and slot is a DTensor, completely local."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from scarctl.testing import AdapterConformance, Training
from tests.adapters.torch.test_conformance import TorchTraining


@pytest.fixture(autouse=True, scope="module")
def group_is_ended() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class FsdpTraining(TorchTraining):
    """The loop of the torch suite, around a sharded model."""

    def __init__(self, variant: str) -> None:
        super().__init__(variant)
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (1,)))
        parameters = list(self.model.parameters())
        assert all(isinstance(parameter, DTensor) for parameter in parameters)
        self.optimizers = [torch.optim.Adam(parameters, lr=0.01)]
        self.schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in self.optimizers]

    def values(self) -> Mapping[str, Any]:
        values = super().values()
        return {name: t.to_local() if isinstance(t, DTensor) else t for name, t in values.items()}


@pytest.mark.usefixtures("forked_runs")
class TestFsdp(AdapterConformance):
    variants = frozenset({"bfloat16", "tied", "frozen", "accumulation"})

    def training(self, variant: str = "") -> Training:
        return FsdpTraining(variant)
