"""Test what a ScarCallback refuses before training, and a store that fails during training."""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from torch import nn

from scarctl.errors import UsageError
from tests.support.lazy import Lazy

if TYPE_CHECKING:
    from accelerate import utils as accelerated

    from scarctl_adapters import transformers as adapter
    from tests.adapters import trainer_runs as runs
else:
    accelerated, adapter = Lazy("accelerate.utils"), Lazy("scarctl_adapters.transformers")
    runs = Lazy("tests.adapters.trainer_runs")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fractoin": 0.5}, "no option 'fractoin' .did you mean fraction"),
        ({"model": nn.Linear(1, 1)}, "model comes from the Trainer"),
        ({"mode": "whole"}, "unknown mode 'whole'"),
        ({"extras": {"trainer": {}}}, "the extra 'trainer' is scarctl's own"),
    ],
)
def test_options(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        adapter.ScarCallback(runs.make_trainer(tmp_path), store=tmp_path / "store", **options)
    assert not (tmp_path / "store").exists()


def test_what_is_no_trainer(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"trainer is a Net, not a transformers.Trainer .trainer.add_callback"
    ):
        adapter.ScarCallback(runs.Net(), store=tmp_path / "store")


def test_two_callbacks(tmp_path: Path) -> None:
    trainer = runs.make_trainer(tmp_path)
    callback = runs.scar(trainer, tmp_path)
    with pytest.raises(UsageError, match="already has a ScarCallback"):
        adapter.ScarCallback(trainer, store=tmp_path / "other")
    trainer.add_callback(callback)
    with pytest.raises(UsageError, match="has two ScarCallbacks"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert not (tmp_path / "store").exists()


def test_a_callback_that_was_not_added(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = runs.make_trainer(tmp_path)
    adapter.ScarCallback(trainer, store=tmp_path / "store")
    trainer.train()
    assert "does not have the ScarCallback (trainer.add_callback): nothing is saved" in caplog.text
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size restarts"),
        ({"optim": "galore_adamw_layerwise"}, "steps within the backward pass"),
    ],
)
def test_arguments_of_the_trainer(tmp_path: Path, arguments: dict[str, Any], said: str) -> None:
    trainer = runs.make_trainer(tmp_path)
    for name, value in arguments.items():
        setattr(trainer.args, name, value)
    with pytest.raises(UsageError, match=said):
        adapter.ScarCallback(trainer, store=tmp_path / "store")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("DEEPSPEED", "DeepSpeed keeps .*DistributedDataParallel"),
        ("XLA", "XLA is not supported"),
    ],
)
def test_strategies(tmp_path: Path, kind: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = runs.make_trainer(tmp_path)
    trainer.accelerator = SimpleNamespace(distributed_type=accelerated.DistributedType[kind])
    with pytest.raises(UsageError, match=said):
        adapter.ScarCallback(trainer, store=tmp_path / "store")


def test_fsdp(tmp_path: Path) -> None:
    trainer = runs.make_trainer(tmp_path)
    trainer.is_fsdp_enabled = True
    with pytest.raises(UsageError, match="shards the model after it has computed"):
        adapter.ScarCallback(trainer, store=tmp_path / "store")


def test_a_search_for_hyperparameters(tmp_path: Path) -> None:
    trainer = runs.make_trainer(tmp_path)
    runs.scar(trainer, tmp_path)
    with pytest.raises(UsageError, match="a store holds one"):
        trainer.train(trial={"learning_rate": 0.1})


def test_going_on_with_other_batches_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runs.resumed(tmp_path, max_steps=4)
    with caplog.at_level(logging.WARNING):
        trainer, callback = runs.resumed(tmp_path, max_steps=6, per_device_train_batch_size=2)
    assert callback.resumed.consistent
    assert "per_device_train_batch_size differs from the run" in caplog.text
    assert trainer.state.global_step == 6


@pytest.mark.parametrize(
    ("adapter", "framework"), [("transformers", "transformers"), ("accelerate", "accelerate")]
)
def test_without_the_framework_the_error_names_the_extra(
    adapter: str, framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == framework]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, framework, None)
    for name in [name for name in sys.modules if name.startswith(f"scarctl_adapters.{adapter}")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'scarctl\[{adapter}\]'"):
        importlib.import_module(f"scarctl_adapters.{adapter}")
