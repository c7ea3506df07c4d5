"""Test a store to which `scarctl checkpoint` has saved: it has no extras of a session."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import scarctl
from scarctl.config import grouped
from scarctl.errors import NoIntactCopy


@pytest.mark.leaves_arena
@pytest.mark.parametrize("mode", ["partial", "rollback"])
def test_resuming_says_once_what_restores_it(tmp_path: Path, mode: str) -> None:
    state = {"a": np.ones((64, 32), np.float32)}
    save_file(state, tmp_path / "state.safetensors")
    command = ["checkpoint", "state.safetensors", "--store", "store", "--step", "4"]
    subprocess.run([sys.executable, "-m", "scarctl", *command], cwd=tmp_path, check=True)
    state["a"][:] = 0
    session = scarctl.attach(state, store=tmp_path / "store", **grouped(daemon=False))
    with pytest.raises(NoIntactCopy) as caught:
        session.resume(mode)
    session.close()
    assert caught.value.message.count("`scarctl recover` restores a run that `scarctl checkpoint` saved") == 1
    assert not state["a"].any()
