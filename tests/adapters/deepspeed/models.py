"""Build a small model under DeepSpeed's engine, and read all of its values as DeepSpeed does."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger, safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import distributed as dist
from torch import nn

logger.setLevel(logging.ERROR)
# Otherwise the first process group compiles a kernel for minutes, which training never calls.
deepspeed.ops.__compatible_ops__ = {}
# It asks for fast instructions. Torch computes in fp16 without them, too.
get_accelerator().is_fp16_supported = lambda: True
PRECISIONS: Mapping[str, Mapping[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3, "hysteresis": 1}},
}


class Net(nn.Module):
    """Parameters of odd sizes, so that ranks share rows; a tied one, a frozen one, a buffer and dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(11, width)
        self.scale = nn.Parameter(torch.rand(width), requires_grad=False)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("mean", torch.zeros(width))
        self.drop = nn.Dropout(0.25)
        self.inner = nn.Linear(width, 7)
        self.outer = nn.Linear(7, width, bias=False)
        self.last = nn.Linear(width, 11, bias=False)
        self.last.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.norm(self.table(ids) * self.scale)
        if self.training:
            self.mean.lerp_(found.detach().mean(0).float(), 0.1)
        found = self.drop(found - self.mean.to(found.dtype))
        logits: torch.Tensor = self.last(self.outer(self.inner(found).relu()))
        return logits


def build(
    stage: int,
    precision: str = "bf16",
    *,
    accumulation: int = 1,
    width: int = 5,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    schedule: bool = True,
    groups: int = 2,
    also: Mapping[str, Any] = {},
    **more: Any,
) -> Any:
    """Return an engine on all ranks. groups: param_groups of the optimizer.

    also: more of DeepSpeed's configuration. more: settings of zero_optimization.
    """
    if not dist.is_initialized():  # a process alone, such as one of the suite's that are killed
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model = Net(width)
    trained = [p for p in model.parameters() if p.requires_grad]
    parts = [trained[:2], trained[2:]] if groups == 2 else [trained]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 1000,
            **({"stage3_param_persistence_threshold": 20} if stage == 3 else {}),
            **more,
        },
        **PRECISIONS[precision],
        **also,
    }
    if schedule:
        times = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.05, "warmup_num_steps": 6}
        config["scheduler"] = {"type": "WarmupLR", "params": times}
    made = optimizer([{"params": part} for part in parts], lr=0.05)
    engine, *_ = deepspeed.initialize(model=model, optimizer=made, config=config, dist_init_required=False)
    return engine


def batch(seed: int) -> torch.Tensor:
    """Return ids; they depend on the seed alone."""
    return torch.randint(0, 11, (4,), generator=torch.Generator().manual_seed(seed))


def one_step(engine: Any, step: int, rank: int) -> None:
    """Make one iteration: as many micro-batches as the engine accumulates."""
    for micro in range(engine.gradient_accumulation_steps()):
        ids = batch(100 * step + 10 * micro + rank)
        engine.backward(nn.functional.cross_entropy(engine(ids).float(), ids.flip(0)))
        engine.step()


def values(engine: Any) -> dict[str, torch.Tensor]:
    """Return whole tensors by name, without the adapter: weights, master weights, slots, buffers. A collective."""
    found: dict[str, torch.Tensor] = {}
    stepped = engine.global_steps > engine.skipped_steps
    if stepped and engine.zero_optimization_stage() < 3:
        # DeepSpeed 0.19.8 does so within the first step, when only the first param_group has state.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found[f"{name}/weight"] = parameter.detach().clone()
        if not parameter.requires_grad:
            continue
        found[name] = safe_get_full_fp32_param(parameter).clone()
        if stepped:
            for key in slots_of(engine):
                found[f"{name}/{key}"] = safe_get_full_optimizer_state(parameter, key).clone()
    return found | {name: buffer.clone() for name, buffer in engine.module.named_buffers()}


def slots_of(engine: Any) -> list[str]:
    """Return the names of the inner optimizer's slots."""
    states = engine.optimizer.optimizer.state
    return sorted({key for state in states.values() for key, value in state.items() if value.dim()})


def digests(engine: Any) -> dict[str, str]:
    """Digests of `values`, of the counters and of the optimizer's settings and counts. A collective."""
    found = {
        name: hashlib.sha256(value.detach().double().numpy().tobytes()).hexdigest()[:12]
        for name, value in values(engine).items()
    }
    return found | {name: repr(value) for name, value in counts(engine).items()}


def counts(engine: Any) -> dict[str, Any]:
    """Return the counts of the engine, its scaler, its schedule and its optimizer."""
    inner = engine.optimizer.optimizer
    return {
        "engine": [engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps],
        "scale": dict(vars(engine.optimizer.loss_scaler)),
        "schedule": engine.lr_scheduler and engine.lr_scheduler.state_dict(),
        "rates": [group["lr"] for group in inner.param_groups],
        "steps": sorted({float(s["step"]) for s in inner.state.values() if "step" in s}),
    }
