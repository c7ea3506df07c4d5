"""Test that a store's settings alone never make a state be cut into very many partitions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import nn

import scarctl
from scarctl.config import grouped
from scarctl.errors import UsageError
from scarctl.formats.state_file import open_state
from scarctl.ops.checkpoint import CheckpointSettings, checkpoint
from scarctl.store import Store, backing

ROWS = 64


@pytest.fixture(autouse=True)
def few_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backing, "FREE", ROWS // 4)


def saved(folder: Path, step: int, **given: int) -> int:
    save_file({"w": np.full((ROWS, 3), step, dtype=np.float32)}, folder / "state.safetensors")
    settings = CheckpointSettings(store=str(folder / "run"), step=step, **given)
    return int(checkpoint(open_state(folder / "state.safetensors"), settings).total_partitions)


def test_a_command_wants_to_be_told(tmp_path: Path) -> None:
    Store.create(tmp_path / "run", partition_bytes=1).close()
    with pytest.raises(UsageError, match="cuts this state into 64 partitions, but has only 0 of them"):
        saved(tmp_path, 1)
    assert Store.open(tmp_path / "run").shards() == []
    assert saved(tmp_path, 1, partition_bytes=1) == ROWS
    assert saved(tmp_path, 2) == ROWS, "it has as many now"


@pytest.mark.parametrize("given", [{"partition_bytes": 1}, {"rows": {"*": 1}}])
def test_a_session_wants_to_be_told(tmp_path: Path, given: dict[str, object]) -> None:
    model = nn.Linear(3, ROWS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(**more: object) -> int:
        options = grouped(interval=1, daemon=False, on_error="raise", **more)
        with scarctl.attach(model, optimizer, store=tmp_path / "run", **options) as session:
            session.resume()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            return session.head_step

    Store.create(tmp_path / "run", **given).close()  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="cuts this state into 128 partitions"):
        step()
    assert step(**given) == 1
    assert step() == 2, "it has as many now"
