"""Test that a Trainer's stopped run continues bit for bit like an uninterrupted one."""

from __future__ import annotations

import json
import signal
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from packaging.version import Version
from torch import nn

from tests.distributed.launch import torchrun
from tests.support.lazy import Lazy
from tests.support.training import differing

if TYPE_CHECKING:
    import peft
    import transformers

    from scarctl_adapters.transformers import ScarCallback
    from tests.adapters import trainer_runs as runs
else:
    peft, transformers, runs = map(Lazy, ("peft", "transformers", "tests.adapters.trainer_runs"))

# peft uses functions that transformers will remove.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> transformers.Trainer:
    """Return the run without scarctl."""
    trainer = runs.make_trainer(tmp_path_factory.mktemp("whole"))
    trainer.train()
    trainer.kept = (runs.state_of(trainer), runs.log_of(trainer))
    return trainer


def assert_same(trainer: transformers.Trainer, whole: transformers.Trainer) -> None:
    state, log = whole.kept
    assert differing(runs.state_of(trainer), state) == []
    assert runs.log_of(trainer) == log


def test_beside_scarctl_a_run_is_what_it_is_without(tmp_path: Path, whole: transformers.Trainer) -> None:
    trainer, callback = runs.resumed(tmp_path)
    assert callback.resumed is not None
    assert callback.resumed.step == 0
    assert_same(trainer, whole)
    assert callback.session is None


@pytest.mark.parametrize(
    ("arguments", "step"),
    [
        pytest.param(
            {"rows": 44},
            7,
            marks=pytest.mark.skipif(
                Version(metadata.version("transformers")) < Version("5"),
                reason="a Trainer that resumes scales that step otherwise",
            ),
        ),
        ({"accelerator_config": {"use_seedable_sampler": False}}, 9),
    ],
    ids=["an epoch ends with a smaller step", "the order is drawn from the global generator"],
)
def test_a_killed_run_goes_on_exactly(tmp_path: Path, arguments: dict[str, Any], step: int) -> None:
    bare = runs.make_trainer(tmp_path / "bare", **arguments)
    bare.train()
    expected = runs.state_of(bare)
    runs.ended_at(tmp_path, "on_step_end", step, signal.SIGKILL, **arguments)
    trainer, _ = runs.resumed(tmp_path, options={"mode": "rollback"}, **arguments)
    assert differing(runs.state_of(trainer), expected) == []


def test_max_steps_within_an_epoch_and_a_run_that_is_done(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, _ = runs.resumed(tmp_path, max_steps=9)
    expected, log = runs.state_of(trainer), trainer.state.log_history
    again = runs.make_trainer(tmp_path, max_steps=9)
    callback = runs.scar(again, tmp_path)
    output = again.train()
    assert (output.global_step, again.state.global_step) == (9, 9)
    assert output.training_loss == log[-1]["train_loss"]
    assert again.state.log_history == log
    assert "all 9 steps are taken already" in caplog.text
    del expected["random numbers"]
    now = runs.state_of(again)
    del now["random numbers"]
    assert differing(now, {name: expected[name] for name in now}) == []
    assert callback.session is None

    longer, callback = runs.resumed(tmp_path, max_steps=12)
    assert callback.resumed is not None
    assert callback.resumed.step == 9
    assert longer.state.global_step == 12


@pytest.mark.long
def test_callbacks_and_the_best_metric_come_back(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "model": runs.gpt,
        "data": runs.Texts,
        "num_train_epochs": 4,
        "learning_rate": 1.0,
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
    }

    def trained(folder: Path, stop: bool = False) -> tuple[transformers.Trainer, ScarCallback]:
        trainer = runs.make_trainer(folder, **arguments)
        trainer.add_callback(transformers.EarlyStoppingCallback(3))
        callback = runs.scar(trainer, folder)
        if stop:
            trainer.add_callback(
                runs.At("on_step_begin", 5, lambda: (_ for _ in ()).throw(KeyboardInterrupt()))
            )
            with pytest.raises(KeyboardInterrupt):
                trainer.train()
        else:
            trainer.train()
        return trainer, callback

    bare, _ = trained(tmp_path / "bare")
    assert bare.state.global_step < 24
    trained(tmp_path / "run", stop=True)
    trainer, callback = trained(tmp_path / "run")
    assert callback.resumed is not None
    assert callback.resumed.step == 5
    assert trainer.state.global_step == bare.state.global_step
    assert trainer.state.best_metric == bare.state.best_metric
    assert Path(trainer.state.best_model_checkpoint).name == Path(bare.state.best_model_checkpoint).name
    # The best model is loaded at the end; the store has the newest.
    assert differing(dict(trainer.model.state_dict()), dict(bare.model.state_dict())) == []
    again, callback = trained(tmp_path / "run")
    assert again.state.global_step >= trainer.state.global_step


@pytest.mark.long
def test_a_checkpoint_of_the_user_wins_and_the_store_gets_its_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments: dict[str, Any] = {
        "model": runs.gpt,
        "data": runs.Texts,
        "save_strategy": "steps",
        "save_steps": 4,
    }
    bare = runs.make_trainer(tmp_path / "bare", **arguments)
    bare.train()
    expected = runs.state_of(bare)
    runs.ended_at(tmp_path, "on_step_end", 11, signal.SIGKILL, **arguments)

    trainer = runs.make_trainer(tmp_path, **arguments)
    callback = runs.scar(trainer, tmp_path, interval=1000)

    def stop() -> None:
        raise KeyboardInterrupt

    trainer.add_callback(runs.At("on_step_begin", 10, stop))
    with pytest.raises(KeyboardInterrupt):
        trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-8"))
    assert "checkpoint-8, not from step" in caplog.text
    assert trainer.state.global_step == 10
    # Without it the store counts again: a part of the checkpoint, and nothing of the run before.
    again, callback = runs.resumed(tmp_path, **arguments)
    assert callback.resumed is not None
    assert callback.resumed.consistent
    assert again.state.global_step == 18
    assert differing(runs.state_of(again), expected) == []


def test_lora_saves_the_frozen_base_once(tmp_path: Path) -> None:

    def lora() -> nn.Module:
        config = peft.LoraConfig(
            r=2, target_modules=["c_attn"], lora_dropout=0.1, task_type="CAUSAL_LM", fan_in_fan_out=True
        )
        model: nn.Module = peft.get_peft_model(runs.gpt(), config)
        return model

    arguments: dict[str, Any] = {"model": lora, "data": runs.Texts}
    bare = runs.make_trainer(tmp_path / "bare", **arguments)
    bare.train()
    trainer = runs.make_trainer(tmp_path, **arguments)
    callback = runs.scar(trainer, tmp_path)
    saved: list[int] = []
    for step in (1, 2, 12):
        trainer.add_callback(
            runs.At("on_step_end", step, lambda: saved.append(callback.session.stats.saved_bytes))
        )
    trainer.add_callback(runs.At("on_step_begin", 13, lambda: (_ for _ in ()).throw(KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trained = sum(p.nbytes for p in trainer.model.parameters() if p.requires_grad)
    base = sum(p.nbytes for p in trainer.model.parameters() if not p.requires_grad)
    assert base > 4 * trained
    # At most the trained parameters and their two moments, in each of the eleven checkpoints that follow.
    assert 0 < saved[2] - saved[1] <= 11 * 3 * trained
    again, callback = runs.resumed(tmp_path, **arguments)
    assert callback.resumed is not None
    assert (callback.resumed.step, callback.resumed.consistent) == (13, True)
    assert differing(runs.state_of(again), runs.state_of(bare)) == []


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.leaves_arena
def test_two_ranks_one_of_which_is_killed(tmp_path: Path, arena_dir: Path) -> None:
    """Both ranks continue from one sealed state, and end bit for bit like a run without scarctl."""
    given = {"out": tmp_path, "store": tmp_path / "store", "arena": arena_dir, "kill_at": 8}
    imports = ("torch.distributed.run", "transformers", "scarctl_adapters.transformers")
    words = json.dumps(given, default=str)
    torchrun("tests.adapters.trainer_runs", words, world=2, timeout=220, imports=imports)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert found[0]["resumed"] == found[1]["resumed"]
    step, exact = found[0]["resumed"]
    assert 1 <= step <= 8
    assert exact
    for rank in found:
        assert differing(rank["whole"], rank["state"]) == []
