"""Test what a session refuses, and that a refusal changes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import scarctl
import scarctl.errors
from scarctl.errors import LayoutMismatch, SettingsConflict, UsageError
from tests.support.training import Loop

pytestmark = pytest.mark.usefixtures("both_savers")


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "store")
    loop.train(3)
    loop.session.close()
    session = scarctl.attach(loop.model, torch.optim.SGD(loop.model.parameters()), store=tmp_path / "store")
    with pytest.raises(LayoutMismatch, match="optimizer Adam -> SGD"):
        session.resume()
    session.close()


def test_an_earlier_run_is_not_overwritten_by_a_loop_that_did_not_resume(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "store")
    loop.train(3)
    loop.session.close()
    again = Loop(tmp_path / "store")
    with pytest.raises(UsageError, match=r"call session.resume\(\)"):
        again.train(1)
    again.session.close()


def test_settings_that_contradict_the_store(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "store", shards=2)
    loop.train(1)
    loop.session.close()
    with pytest.raises(SettingsConflict, match="shards"):
        Loop(tmp_path / "store", shards=3)
    loop = Loop(tmp_path / "store", shards=2, fraction=0.5, policy="round")
    loop.session.close()


@pytest.mark.parametrize(
    "bad",
    [
        {"fraction": float("nan")},
        {"interval": 0},
        {"policy": "best"},
        {"shards": 0},
    ],
    ids=str,
)
def test_bad_arguments_are_refused_before_anything_is_written(tmp_path: Path, bad: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Loop(tmp_path / "store", **bad)
    assert not (tmp_path / "store").exists()


def test_several_models_are_passed_as_one(tmp_path: Path) -> None:
    both = [nn.Linear(2, 2), nn.Linear(2, 2)]
    for held in (both, dict(zip("ab", both, strict=True))):
        with pytest.raises(UsageError, match=r"as one: torch\.nn\.ModuleDict"):
            scarctl.attach(held, store=tmp_path / "store")
    with pytest.raises(UsageError, match="the model itself"):
        scarctl.attach(both[0].state_dict(), store=tmp_path / "store")


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(scarctl.errors.NoStore):
        Loop(tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_step_counted_by_the_loop_may_not_go_backwards(tmp_path: Path) -> None:
    session = scarctl.attach({"w": np.zeros(4)}, store=tmp_path / "store")
    session.step(5)
    for bad in (5, 4, -1):
        with pytest.raises(UsageError):
            session.step(bad)
    session.step(6)
    session.close()


def test_a_step_beside_the_hooks_is_refused_at_once(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "store", hooks="auto")
    with pytest.raises(UsageError, match="optimizers' steps count as iterations already"):
        loop.session.step()
    loop.session.close()
