"""Run the adapters' suite with a Trainer."""

from __future__ import annotations

from scarctl.testing import AdapterConformance, Training


class TestTrainer(AdapterConformance):
    variants = frozenset({"tied", "frozen", "accumulation"})

    def training(self, variant: str = "") -> Training:
        from tests.adapters.transformers.training import TrainerTraining

        return TrainerTraining(variant)
