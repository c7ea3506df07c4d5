"""Test fits in lower precision: with a gradient scaler, and with bfloat16 parameters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from scarctl.state.torch_dtypes import plain
from tests.support.lazy import Lazy

if TYPE_CHECKING:
    from lightning.pytorch.plugins import precision as plugins

    from tests.adapters.lightning import fits
else:
    fits = Lazy("tests.adapters.lightning.fits")
    plugins = Lazy("lightning.pytorch.plugins.precision")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def scaled() -> dict[str, Any]:
    """Use float16 on the CPU, where Lightning's precision="16-mixed" falls back to bfloat16. The scale doubles often,
    and some steps overflow and are skipped.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
    return {"plugins": [plugins.MixedPrecision("16-mixed", device="cpu", scaler=scaler)]}


def state_of(net: fits.Net, trainer: Any) -> dict[str, Any]:
    found = fits.outcome(net, trainer) if net.embed.weight.dtype == torch.float32 else {}
    weights = {f"{name} itself": str(plain(value)) for name, value in net.state_dict().items()}
    return {**found, **weights, "scaler": str(trainer.precision_plugin.state_dict())}


@pytest.mark.parametrize("precision", ["scaled", "bf16-true"])
def test_a_fit_goes_on_exactly(precision: str, tmp_path: Path) -> None:
    def arguments() -> dict[str, Any]:
        return scaled() if precision == "scaled" else {"precision": precision}

    whole = state_of(*fits.fit(fits.Net, None, accumulate_grad_batches=1, **arguments()))
    with pytest.raises(fits.Interrupted):
        fits.fit(fits.Net, tmp_path / "store", ("train", 1, 3), accumulate_grad_batches=1, **arguments())
    net, trainer = fits.fit(fits.Net, tmp_path / "store", accumulate_grad_batches=1, seed=9, **arguments())
    resumed = trainer.callbacks[0].resumed
    assert resumed.consistent
    assert 0 < resumed.step <= 9
    assert fits.differing(state_of(net, trainer), whole) == []
    if precision == "scaled":
        assert resumed.step < 9, "no step has overflowed"
