"""Test help examples that need a running session or other files. test_help.py runs the rest."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from scarctl.rehearse.rehearsal import Rehearsal, Rehearsed
from tests.cli.conftest import Model, Run, examples
from tests.cli.test_daemon import Training


def test_examples_on_a_running_session(run: Run, folder: Path) -> None:
    """Examples of ranks are run in test_rank_jobs.py."""
    training = Training(**{"layers.3.w": np.zeros((16, 8), np.float32)})
    try:
        (by_name, by_rank, by_member) = examples(run, "live recover")
        assert (by_rank[-1], by_member[-1]) == ("rank:1", "member:2")
        for words in (
            *examples(run, "live checkpoint"),
            by_name,
            *examples(run, "live")[:2],
            *examples(run, "evacuate"),
        ):
            # The run has no peers: the host of the example is unknown.
            run(*words, code=2 if "--to" in words else 0)
    finally:
        training.end()


def test_examples_of_the_daemon(run: Run, folder: Path) -> None:
    """A free port replaces the shown one, which another program may have."""
    start, publish, status, release, end = examples(run, "daemon")
    run(*start)
    assert run(*status).document["running"]
    assert "saves nothing to this store" in run(*release, code=2).stderr
    run(*end)
    assert "/metrics" in run(*publish[:-1], "0").stdout
    run(*end)


def test_examples_of_rehearse(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they run is replaced: whole rehearsals are in tests/rehearse."""
    asked = []

    def rehearsed(self: Rehearsal, steps: int) -> Rehearsed:
        asked.append((self._command, steps))
        return Rehearsed(
            "identical", steps, "2026-11-22T10:00:00+00:00", " ".join(self._command), 5, 1, (), (), ()
        )

    monkeypatch.setattr(Rehearsal, "run", rehearsed)
    for words in examples(run, "rehearse"):
        run(*words)
    assert asked == [
        (["python", "train.py"], 40),
        (["torchrun", "--nproc-per-node", "8", "train.py"], 10),
    ]


def test_examples_of_diff(run: Run, saved: Model) -> None:
    shutil.copy(saved.path, "before.safetensors")
    run("snapshot", "create", "best", saved.path, "--store", "ckpt", "--step", 1200)
    saved.train("emb")
    shutil.copy(saved.path, "after.safetensors")
    torch.save(saved.tensors, "model.pt")
    run("checkpoint", saved.path, "--store", "ckpt", "--step", 1201)
    save_file(saved.tensors, "float32.safetensors")
    save_file({name: value.bfloat16() for name, value in saved.tensors.items()}, "bfloat16.safetensors")
    files, snapshots, sealed, dtypes = examples(run, "diff")
    for words in (files, snapshots, sealed, dtypes):
        run(*words, code=4)
