"""Test `Session.metrics`: figures are read where they are counted, and match the table that documents them."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import scarctl
from scarctl.session.metrics import UNITS
from scarctl.state.version import step_of
from tests.support.training import Loop, drained

pytestmark = pytest.mark.usefixtures("both_savers")

ROOT = Path(__file__).parents[2]


def test_figures_are_those_of_the_session_and_its_copies(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "store", interval=3)
    session = loop.session
    assert session.metrics("")["step"] == 0
    assert "durable_step" not in session.metrics(""), "unknown, and not 0"
    loop.train(7, settle=True)
    loop.session._saving.finish()
    drained([session])
    found, stats, engine = session.metrics(""), session.stats, session._engine
    assert engine is not None
    ages = 7 - step_of(engine.arena.newest())
    assert found["step"] == session.head_step == 7
    assert found["interval"] == 3
    assert (found["staleness_max"], found["staleness_median"]) == (ages.max(), np.median(ages))
    assert ages.max() == 1, "memory has all of step 6"
    assert found["pending_partitions"] == engine.arena.pending().sum() > 0, "the store gets a part of it"
    assert found["lag"] == 0, "nothing waits"
    assert (found["durable_step"], found["sealed_step"]) == (6, 1)
    assert found["oldest_durable_step"] == step_of(engine.arena.durable).min() < 6
    assert (found["checkpoints"], found["saved_bytes"]) == (stats.checkpoints, stats.saved_bytes)
    assert found["stall_seconds"] == stats.stall_seconds > 0
    assert 0 < found["overhead"] <= 1
    assert (found["errors"], found["recoveries"], found["torn_copies"]) == (0, 0, 0)
    assert found["caveats"] == len(list(session.caveats))
    session.recover(lost="embed.*")
    assert session.metrics("")["recoveries"] == 1
    session.close()


def test_every_documented_figure_occurs_and_no_other(tmp_path: Path) -> None:
    """The problem is convex, so that its convergence is estimated, and the speed of the daemon or thread is known."""
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    inputs, wanted = torch.randn(64, 16), torch.randn(64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = scarctl.attach(model, optimizer, store=tmp_path / "store", interval=2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), wanted).backward()
        optimizer.step()
        session._saving.finish()
        drained([session])
    found = session.metrics()
    session.close()
    prefixed = {f"scarctl/{name}" for name in UNITS}
    assert found.keys() <= prefixed
    assert prefixed - found.keys() <= {"scarctl/bandwidth"}, "the daemon reports its speed now and then"
    assert all(type(value) in (int, float) and math.isfinite(value) for value in found.values())
    assert 0 <= found["scarctl/rework"] <= found["scarctl/rework_high"]


def test_the_table_has_these_figures_and_units() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text, re.MULTILINE))
    assert {name: unit for name, unit in rows.items() if not name.startswith("scarctl_")} == UNITS
