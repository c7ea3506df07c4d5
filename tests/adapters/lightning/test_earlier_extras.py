"""Test that a resume reads the data order of a fit that an earlier version has saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from scarctl.state.torch_dtypes import plain
from scarctl.stateful import capture_host_rng
from scarctl_adapters.lightning.data_order import DataOrder
from tests.adapters.lightning.fits import Interrupted, Net, differing, fit, outcome

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def random_then(self: DataOrder) -> Any:
    """`DataOrder.random_now` as in the first stores."""
    own = [generator.get_state() for generator in self._generators()]
    new = all(getattr(loader, "_iterator", None) is None for loader in self._loaders())
    return plain({"host": capture_host_rng(), "torch": torch.get_rng_state(), "own": own, "new": new})


def test_a_fit_of_an_earlier_version_goes_on_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = outcome(*fit(Net, None))
    with monkeypatch.context() as earlier:
        earlier.setattr(DataOrder, "random_now", random_then)
        with pytest.raises(Interrupted):
            fit(Net, tmp_path / "store", ("train", 1, 4))
    assert differing(outcome(*fit(Net, tmp_path / "store")), expected) == []
