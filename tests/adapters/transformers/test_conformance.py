"""Run the adapters' suite with a Trainer."""

from __future__ import annotations

import pytest

from scarctl.testing import AdapterConformance, Training


@pytest.mark.usefixtures("forked_runs")
class TestTrainer(AdapterConformance):
    variants = frozenset({"tied", "frozen", "accumulation"})

    def training(self, variant: str = "") -> Training:
        from tests.adapters.transformers.training import TrainerTraining

        return TrainerTraining(variant)
