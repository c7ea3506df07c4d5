"""Build trainings of a very small Llama by torchtitan's Trainer, and read all of their values without scarctl."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed as dist

from examples.torchtitan_llama import llama
from scarctl_adapters.torchtitan import ScarCheckpointManager

# The Trainer's last act is to sleep for two seconds.
llama.titan.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)
LENGTH, BATCH = 16, 2


class Visited(ScarCheckpointManager):
    """Calls `visit` with the session before the first step, and after every step."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(ScarCheckpointManager.Config):
        visit: Any = None

    def __init__(self, config: Config, **components: Any) -> None:
        super().__init__(config, **components)
        self._visit = config.visit

    def _load(self, step: int = -1) -> bool:
        found = super()._load(step)
        self._visit(self.session)
        return found

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        found = super()._save(curr_step, last_step)
        self._visit(self.session)
        return found


def trainer(
    folder: Path, steps: int, checkpoint: Any = None, *, width: int = 16, tied: bool = False, **more: Any
) -> Any:
    """Return a new Trainer. checkpoint: the manager's settings; by default scarctl's, with a store in `folder`.

    more: see `llama.config`.
    """
    if not dist.is_initialized():  # a process alone, such as one of the suite's that are killed
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    spec = llama.model(width, 2, LENGTH, tied)
    manager = checkpoint or ScarCheckpointManager.Config(interval=1000)
    return llama.config(folder, steps, manager, spec=spec, length=LENGTH, batch=BATCH, **more).build()


def values(trainer: Any) -> dict[str, torch.Tensor]:
    """Return this rank's parts of parameters and slots, by name. The model has no persistent buffers."""
    (module,) = trainer.model_parts
    found = dict(module.named_parameters(remove_duplicate=False))
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for optimizer in trainer.optimizers:
        for parameter, state in optimizer.state.items():
            slots = {key: value for key, value in state.items() if value.dim()}
            found |= {f"{names[id(parameter)]}/{key}": value for key, value in slots.items()}
    return {name: getattr(value, "_local_tensor", value).detach() for name, value in found.items()}


def counts(trainer: Any) -> dict[str, Any]:
    """Return all counts of the Trainer, its schedules and its optimizers."""
    return {
        "trainer": trainer.state_dict(),
        "schedules": trainer.lr_schedulers.get_metrics(),
        "last_epoch": [schedule.last_epoch for schedule in trainer.lr_schedulers],
        "rates": [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
        "steps": sorted({float(s["step"]) for o in trainer.optimizers for s in o.state.values()}),
    }


def digests(trainer: Any) -> dict[str, str]:
    """Digests of whole values, and the counts. A collective."""
    (module,) = trainer.model_parts
    found = dict(module.named_parameters())
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for optimizer in trainer.optimizers:
        for parameter, state in optimizer.state.items():
            found |= {f"{names[id(parameter)]}/{key}": value for key, value in state.items()}
    whole = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in found.items()
    }
    sums = {
        name: hashlib.sha256(value.detach().double().numpy().tobytes()).hexdigest()[:12]
        for name, value in whole.items()
    }
    return sums | {name: repr(value) for name, value in counts(trainer).items()}
