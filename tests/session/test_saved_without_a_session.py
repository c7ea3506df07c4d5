"""Test a store to which `scarctl checkpoint` has saved: it has no extras of a session."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import scarctl
from scarctl.errors import NoIntactCopy
from scarctl.formats.state_file import open_state
from scarctl.ops.checkpoint import CheckpointSettings, checkpoint


@pytest.mark.leaves_arena
@pytest.mark.parametrize("mode", ["partial", "rollback"])
def test_resuming_says_once_what_restores_it(tmp_path: Path, mode: str) -> None:
    state = {"a": np.ones((64, 32), np.float32)}
    save_file(state, tmp_path / "state.safetensors")
    settings = CheckpointSettings(store=str(tmp_path / "store"), step=4)
    checkpoint(open_state(tmp_path / "state.safetensors"), settings)
    state["a"][:] = 0
    session = scarctl.attach(state, store=tmp_path / "store")
    with pytest.raises(NoIntactCopy) as caught:
        session.resume(mode)
    session.close()
    assert caught.value.message.count("`scarctl recover` restores a run that `scarctl checkpoint` saved") == 1
    assert not state["a"].any()
