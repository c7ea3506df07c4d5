"""Run the adapters' suite with a Lightning fit."""

from __future__ import annotations

import pytest

from scarctl.testing import AdapterConformance, Training

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.mark.usefixtures("forked_runs")
class TestLightning(AdapterConformance):
    variants = frozenset({"accumulation", "several-optimizers"})

    def training(self, variant: str = "") -> Training:
        from tests.adapters.lightning.training import LightningTraining

        return LightningTraining(variant)
