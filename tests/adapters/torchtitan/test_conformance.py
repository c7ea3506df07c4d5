"""Test torchtitan's Trainer with the published suite, in one process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scarctl.testing import AdapterConformance, Training, Visit

pytest.importorskip("torchtitan", reason="torchtitan is not installed here: `make frameworks`")

from torchtitan.components.dataloader import BaseDataLoader

from examples.torchtitan_llama import llama
from scarctl_adapters.torchtitan import ScarCheckpointManager
from tests.adapters.torchtitan import models


class Loader(BaseDataLoader):
    """Batches that depend on the position, and on every global generator. The position can be set at any time."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """No settings."""

    def __init__(self, config: Config, **given: Any) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            self.position += 1
            noise = int(random.random() * 100) + np.random.randint(100)
            ids = torch.randint(0, llama.BYTES, (models.BATCH, models.LENGTH + 1))
            ids = (ids + noise + self.position) % llama.BYTES
            yield {"input": ids[:, :-1]}, ids[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


class TitanTraining(Training):
    """`Trainer.train`."""

    def __init__(self, variant: str) -> None:
        random.seed(1)
        np.random.seed(2)
        self.trainer = models.trainer(
            Path("unused"),
            0,
            ScarCheckpointManager.Config(enable=False),
            width=32 if variant == "changed" else 16,
            tied=variant == "tied",
            groups=[llama.adam("norm", "Adam"), llama.adam()] if variant == "several-optimizers" else None,
            accumulation=3 if variant == "accumulation" else 1,
            loader=Loader.Config(),
            dtype="bfloat16" if variant == "bfloat16" else "float32",
        )

    def run(
        self, store: Path, until: int, visit: Visit, *, resume: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        trainer = self.trainer
        trainer.config.training.steps = until
        trainer.config.checkpoint = models.Visited.Config(
            folder=f"{store}-titan",
            interval=1000,
            store=str(store),
            visit=visit,
            mode=resume.get("mode", "partial"),
            snapshot=resume.get("snapshot"),
            options=dict(options),
        )
        trainer.checkpointer = trainer.config.checkpoint.build(
            dataloader=trainer.dataloader,
            model_parts=trainer.model_parts,
            optimizers=trainer.optimizers,
            lr_schedulers=trainer.lr_schedulers,
            states={"train_state": trainer},
            sd_adapter=None,
        )
        try:
            trainer.train()
        finally:
            trainer.checkpointer.close()

    def values(self) -> Mapping[str, Any]:
        return models.values(self.trainer)

    def extras(self) -> Mapping[str, Any]:
        return {"position": self.trainer.dataloader.position, **models.counts(self.trainer)}


class TestTrainer(AdapterConformance):
    variants = frozenset({"accumulation", "bfloat16", "several-optimizers", "tied"})

    def training(self, variant: str = "") -> Training:
        return TitanTraining(variant)
