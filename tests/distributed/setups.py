"""Make small models that are divided among ranks in every possible way. Run by `launch`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


class Net(nn.Module):
    """A model whose 11 and 3 rows do not divide evenly; a bias of 3 leaves a fourth rank without any."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 11)
        self.norm = nn.BatchNorm1d(11)
        self.down = nn.Linear(11, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.frozen(self.down(self.norm(self.up(x)).relu()))
        return result


class Even(nn.Module):
    """A model for tensor parallel, whose modules need sizes that divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.up(x).relu())
        return result


@dataclass
class Job:
    """One rank's model and optimizer."""

    model: nn.Module
    optimizer: Optimizer
    replicated: tuple[str, ...] = ()
    width: int = 6

    def step(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.optimizer.zero_grad()
        self.model(torch.randn(8, self.width)).square().sum().backward()
        self.optimizer.step()


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)


def ddp() -> Job:
    model = DistributedDataParallel(Net())
    return Job(model, adam(model))


def by_hand() -> Job:
    model = Net()
    return Job(model, adam(model), replicated=("up.*", "down.*", "frozen.*", "norm.*"))


def zero() -> Job:
    model = DistributedDataParallel(Net())
    trained = [p for p in model.parameters() if p.requires_grad]
    return Job(model, ZeroRedundancyOptimizer(trained, torch.optim.Adam, lr=0.01))


def fsdp() -> Job:
    model = Net()
    fully_shard(model.up)
    fully_shard(model)
    return Job(model, adam(model))


def fsdp_offload() -> Job:
    model = Even()
    offload = CPUOffloadPolicy(pin_memory=False)
    fully_shard(model, offload_policy=offload, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return Job(model, adam(model))


def tensor_parallel() -> Job:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(Even(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return Job(model, adam(model))


def hsdp() -> Job:
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return Job(model, adam(model))


def fsdp_and_tensor_parallel() -> Job:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(Even(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return Job(model, adam(model))


class Experts(nn.Module):
    """A shared trunk, an expert with its own name on every rank, and an expert whose name all ranks use."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.trunk = DistributedDataParallel(Even())
        self.experts = nn.ModuleDict({str(rank): nn.Linear(4, 5)})
        self.expert = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.trunk(x)
        for expert in self.experts.values():
            x = expert(x)
        result: torch.Tensor = self.expert(x)
        return result


def experts() -> Job:
    torch.manual_seed(dist.get_rank())
    model = Experts(dist.get_rank())
    return Job(model, adam(model))


SETUPS: dict[str, tuple[int, Callable[[], Job]]] = {
    "ddp": (2, ddp),
    "by-hand": (2, by_hand),
    "zero": (2, zero),
    "fsdp": (2, fsdp),
    "fsdp-offload": (2, fsdp_offload),
    "tensor-parallel": (2, tensor_parallel),
    "experts": (2, experts),
    "fsdp-empty": (4, fsdp),
    "hsdp": (4, hsdp),
    "fsdp-and-tensor-parallel": (4, fsdp_and_tensor_parallel),
}
