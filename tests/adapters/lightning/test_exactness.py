"""A fit that ends anywhere and is run again ends bit for bit like one that was never interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.adapters.lightning.fits import (
    EXACT,
    Interrupted,
    ManualNet,
    Net,
    PlateauNet,
    Point,
    differing,
    fit,
    interrupt,
    kill,
    outcome,
    points,
)
from tests.support.process import Forked

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.mark.parametrize("kind", [ManualNet])
def test_a_fit_ends_the_same_wherever_it_was_interrupted(kind: type[Net], tmp_path: Path) -> None:
    whole, trainer = fit(kind, None, val_check_interval=0.5)
    expected, wrong = outcome(whole, trainer), {}
    for number, point in enumerate(points()):
        store = tmp_path / str(number)
        with pytest.raises(Interrupted):
            fit(kind, store, point, val_check_interval=0.5)
        net, trainer = fit(kind, store, val_check_interval=0.5)
        wrong[point] = differing(outcome(net, trainer), expected)
        if net.seen != whole.seen[len(whole.seen) - len(net.seen) :]:
            wrong[point].append("data")
    assert {point: names for point, names in wrong.items() if names} == {}
