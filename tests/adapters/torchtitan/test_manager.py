"""What the manager makes of torchtitan's settings and objects, in one process."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from scarctl.errors import UsageError

pytest.importorskip("torchtitan", reason="torchtitan is not installed here: `make frameworks`")

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.config import ConfigManager
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader

from examples.torchtitan_llama import llama
from scarctl_adapters.torchtitan import ScarCheckpointManager
from tests.adapters.torchtitan import models


def trained(folder: Path, steps: int, **kind: Any) -> Any:
    """Return a Trainer that has trained until this step, and is closed."""
    trainer = models.trainer(folder, steps, **kind)
    try:
        trainer.train()
    finally:
        trainer.close()
    return trainer


def test_one_line_of_the_configuration_saves_and_continues(tmp_path: Path) -> None:
    """With torchtitan's own loader: a resumed run has the losses of an undisturbed one."""
    whole = trained(tmp_path / "whole", 8)
    trained(tmp_path / "halves", 4)
    resumed = trained(tmp_path / "halves", 8)
    assert (tmp_path / "halves" / "scarctl").is_dir()
    assert (resumed.checkpointer.resumed.step, resumed.checkpointer.resumed.consistent) == (4, True)
    assert models.digests(resumed) == models.digests(whole)
    losses = whole.metrics_processor.losses
    assert resumed.metrics_processor.losses == {step: losses[step] for step in (5, 6, 7, 8)}


def test_torchtitans_own_checkpoints_stay(tmp_path: Path) -> None:
    """Those of its interval and of the last step; a run without scarctl continues from them."""
    manager = ScarCheckpointManager.Config(interval=2, last_save_model_only=False)
    first = trained(tmp_path, 5, checkpoint=manager)
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-2", "step-4", "step-5"]
    theirs = CheckpointManager.Config(enable=True, interval=2)
    assert trained(tmp_path, 5, checkpoint=theirs).step == first.step == 5


@pytest.mark.parametrize("where", ["folder", "initial_load_path"])
def test_an_empty_store_begins_with_torchtitans_checkpoint(tmp_path: Path, where: str) -> None:
    """A run that has used torchtitan alone takes scarctl on, and continues from the store afterwards."""
    whole = trained(tmp_path / "whole", 8)
    theirs = CheckpointManager.Config(enable=True, interval=100, last_save_model_only=False)
    trained(tmp_path / "old", 3, checkpoint=theirs)
    new = tmp_path / ("old" if where == "folder" else "new")
    settings: dict[str, Any] = {"interval": 100}
    if where != "folder":
        path = str(tmp_path / "old" / "checkpoint" / "step-3")
        settings |= {"initial_load_path": path, "initial_load_model_only": False}
    taken = trained(new, 5, checkpoint=ScarCheckpointManager.Config(**settings))
    assert taken.checkpointer.resumed.new
    assert list(taken.metrics_processor.losses) == [4, 5]
    resumed = trained(new, 8, checkpoint=ScarCheckpointManager.Config(**settings))
    assert (resumed.checkpointer.resumed.step, resumed.checkpointer.resumed.consistent) == (2, True)
    assert models.digests(resumed) == models.digests(whole)


def test_an_older_store_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path, 3, checkpoint=ScarCheckpointManager.Config(last_save_model_only=False))
    theirs = CheckpointManager.Config(enable=True, interval=100, last_save_model_only=False)
    trained(tmp_path, 6, checkpoint=theirs)
    with caplog.at_level(logging.WARNING, "scarctl"):
        trained(tmp_path, 4)
    assert any("continuing after step 3" in text and "has step 6" in text for text in caplog.messages)
    with pytest.raises(UsageError, match="load_step is 6"):
        trained(tmp_path, 8, checkpoint=ScarCheckpointManager.Config(load_step=6))


@pytest.mark.parametrize("setting", ["batch_size", "dataset_name", "seq_len"])
def test_other_batches_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, setting: str
) -> None:
    trained(tmp_path, 3)
    monkeypatch.setitem(DATASETS, "again", DATASETS["argparse"])
    loader = HuggingFaceTextDataLoader.Config(dataset="again" if setting == "dataset_name" else "argparse")
    if setting != "dataset_name":
        name = "BATCH" if setting == "batch_size" else "LENGTH"
        monkeypatch.setattr(models, name, 2 * getattr(models, name))
    resumed = trained(tmp_path, 5, loader=loader).checkpointer.resumed
    assert (resumed.step, resumed.consistent) == (3, True)
    assert f"{setting} differs from the run's: the next batches differ" in caplog.text


def test_a_loader_that_is_read_keeps_its_position(tmp_path: Path) -> None:
    """A rollback in the running process would restore all but the iterator of the Trainer."""

    def visit(session: Any) -> None:
        if session.head_step == 2:
            session.checkpoint(full=True, wait=True)
        if session.head_step == 4:
            session.recover("all", mode="rollback")

    with pytest.raises(UsageError, match="position of a loader cannot change"):
        trained(tmp_path, 5, checkpoint=models.Visited.Config(interval=100, visit=visit))


REFUSED: dict[str, Callable[[], Any]] = {
    "load_only": lambda: ScarCheckpointManager.Config(load_only=True),
    "mode is 'newest'": lambda: ScarCheckpointManager.Config(mode="newest"),
    "hooks comes from torchtitan": lambda: ScarCheckpointManager.Config(options={"hooks": "off"}),
    "fractoin": lambda: ScarCheckpointManager.Config(options={"fractoin": 0.5}),
    "'train_state' is scarctl's own": lambda: ScarCheckpointManager.Config(
        options={"extras": {"train_state": {}}}
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_settings_that_do_not_fit_are_refused(message: str) -> None:
    with pytest.raises(UsageError, match=message):
        REFUSED[message]()


def test_stages_of_a_pipeline_are_refused(tmp_path: Path) -> None:
    trainer = models.trainer(tmp_path, 1, CheckpointManager.Config())
    given = {"optimizers": trainer.optimizers, "lr_schedulers": trainer.lr_schedulers, "states": {}}
    with pytest.raises(UsageError, match="divided into stages"):
        ScarCheckpointManager.Config().build(
            dataloader=None, model_parts=trainer.model_parts * 2, sd_adapter=None, **given
        )


def test_steps_without_a_load_are_refused(tmp_path: Path) -> None:
    trainer = models.trainer(tmp_path, 1)
    trainer.checkpointer.save(0, last_step=True)  # a seed checkpoint
    assert (tmp_path / "checkpoint" / "step-0").is_dir()
    with pytest.raises(UsageError, match="nothing is attached"):
        trainer.checkpointer.save(1)
    trainer.close()


def test_the_command_line_has_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan makes its command line of the configuration's types."""
    module = ModuleType("tiny_registry")
    spec = llama.model(16, 1, 16)
    manager = ScarCheckpointManager.Config()
    module.__dict__["tiny"] = lambda: llama.config(Path("out"), 3, manager, spec=spec, length=16)
    monkeypatch.setitem(sys.modules, "tiny_registry", module)
    given = ["--module", "tiny_registry", "--config", "tiny", "--checkpoint.store", "s3://b/run"]
    found = ConfigManager().parse_args(given)
    assert (found.checkpoint.store, type(found.checkpoint)) == ("s3://b/run", ScarCheckpointManager.Config)


def test_values_are_those_of_the_model(tmp_path: Path) -> None:
    """`export --weights` has the names of parameters; torchtitan's files split the fused ones."""
    trainer = trained(tmp_path, 1)
    (module,) = trainer.model_parts
    assert any(".wqkv." in name for name, _ in module.named_parameters())
    assert not any(".wqkv." in name for name in module.state_dict())
    assert all(isinstance(value, torch.Tensor) for value in models.values(trainer).values())
