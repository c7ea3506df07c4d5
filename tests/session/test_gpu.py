"""Runs on a GPU that are killed and started again, as programs: they end as one that was never stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.session.gpu_loop import KINDS

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.leaves_arena,
    pytest.mark.timeout(300),
]


def run(kind: str, store: Path, *options: str, code: int = 0) -> dict[str, Any]:
    environ = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    command = [sys.executable, "-m", "tests.session.gpu_loop", kind, str(store), *options]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1]) if code == 0 else {}


@pytest.mark.parametrize("kind", KINDS)
def test_a_terminated_run_is_resumed_exactly(kind: str, tmp_path: Path, arena_dir: Path) -> None:
    whole = run(kind, tmp_path / "whole")
    run(kind, tmp_path / "store", "--die-after", "11", "--signal", "SIGTERM", code=-signal.SIGTERM)
    resumed = run(kind, tmp_path / "store")
    assert resumed["consistent"], resumed
    skipped = 11 - resumed["step"]
    assert skipped == 0 or (kind == "scaled" and skipped < 11)
    assert resumed["errors"] == whole["errors"] == 0
    assert resumed["digest"] == whole["digest"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_is_resumed_and_called_exact_only_if_it_is(
    kind: str, tmp_path: Path, arena_dir: Path
) -> None:
    whole = run(kind, tmp_path / "whole")
    run(kind, tmp_path / "store", "--die-after", "11", code=-signal.SIGKILL)
    resumed = run(kind, tmp_path / "store")
    assert 0 < resumed["step"] <= 11
    assert not resumed["consistent"] or resumed["digest"] == whole["digest"]


def test_a_captured_step_is_said_at_once_and_counted_by_hand(tmp_path: Path, arena_dir: Path) -> None:
    found = run("captured", tmp_path / "store")
    assert any("captured in a CUDA graph" in line for line in found["said"])
    by_hand = run("captured-by-hand", tmp_path / "by-hand")
    assert not any("captured" in line for line in by_hand["said"])
    assert by_hand["steps"] == 24
    assert by_hand["digest"] == found["digest"]
    again = run("captured-by-hand", tmp_path / "by-hand")
    assert again["step"] == 24
    assert again["resumed"] == by_hand["digest"]
