"""Run the adapters' suite with an Accelerate loop."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from packaging.version import Version

from scarctl.testing import AdapterConformance, Training, Visit
from scarctl_adapters.accelerate import attach_and_resume
from tests.adapters.accelerate_runs import forget_accelerators
from tests.adapters.torch.test_conformance import TorchTraining


class LoopTraining(TorchTraining):
    """The loop of the torch suite, over shuffled data, prepared by an Accelerator."""

    def __init__(self, variant: str) -> None:
        forget_accelerators()
        super().__init__(variant)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=self.backwards)
        data = torch.utils.data.TensorDataset(torch.arange(24) % 8)
        self.loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
        self.prepared, self.loader = self.accelerator.prepare(self.model, self.loader)
        optimizers = [self.accelerator.prepare(o) for o in self.optimizers]
        self.resets = [optimizer.zero_grad for optimizer in optimizers]
        self.steps = [o.step for o in (*optimizers, *map(self.accelerator.prepare, self.schedulers))]

    def run(
        self, store: Path, until: int, visit: Visit, *, resume: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        with attach_and_resume(self.accelerator, store=store, **resume, **options) as run:
            step = run.resumed.step
            visit(run.session)
            while step < until:
                for (ids,) in run.batches(self.loader):
                    with self.accelerator.accumulate(self.prepared):
                        noise = random.random() + np.random.rand()
                        self.accelerator.backward(self.prepared(ids).square().mean() * noise)
                        for act in (*self.steps, *self.resets):
                            act()
                    if self.accelerator.sync_gradients:
                        step += 1
                        visit(run.session)
                        if step == until:
                            return


@pytest.mark.usefixtures("forked_runs")
class TestAccelerate(AdapterConformance):
    variants = frozenset({"tied", "frozen", "accumulation", "several-optimizers"})

    @pytest.fixture(autouse=True)
    def alone(self) -> Iterator[None]:
        yield
        forget_accelerators()

    def test_nothing_of_the_training_outlives_it(self, tmp_path: Path) -> None:
        if Version(accelerate.__version__) < Version("1.15"):
            pytest.skip("older versions keep a loader that was not used up")
        super().test_nothing_of_the_training_outlives_it(tmp_path)

    def training(self, variant: str = "") -> Training:
        return LoopTraining(variant)
