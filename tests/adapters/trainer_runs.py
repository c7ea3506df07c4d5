"""Small runs of Hugging Face's Trainer, in this process or in a forked one that is killed.

Models of some hundred parameters with dropout, shuffled data, two batches per step, a schedule, and an evaluation that
draws random numbers between two steps. An epoch of 12 batches has 6 steps.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import scarctl
from scarctl.config import grouped
from scarctl_adapters.transformers import ScarCallback
from tests.support.process import Forked
from tests.support.training import drain, whole_state

EXACT: dict[str, Any] = {"selection": scarctl.Selection(policy="full"), "interval": 1}
"""Return arguments with which every step is sealed."""


class Net(nn.Module):
    """A model with dropout, batch norm, and an embedding that shares its weights with the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.25)
        self.out = nn.Linear(8, 16, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.out(self.drop(self.norm(self.embed(ids))))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Data determined by their index."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"ids": torch.tensor(index % 16), "labels": torch.tensor(index * 7 % 16)}


class Texts(Rows):
    """Data for a language model, determined by their index."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(6) * 5 + index) % 16
        return {"input_ids": ids, "labels": ids}


class At(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """A callback that acts at an event after some steps."""

    def __init__(self, event: str, step: int, action: Callable[[], object]) -> None:
        self.step, self.action = step, action
        setattr(self, event, self.act)

    def act(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.action()


class Drained(TrainerCallback):  # type: ignore[misc]
    """A callback that waits after every step until its checkpoint is durable: longer steps would not need to."""

    def __init__(self, callback: ScarCallback) -> None:
        self.callback = callback

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        session = self.callback.session
        assert session is None or drain(session)


def gpt() -> GPT2LMHeadModel:
    """Return a transformer with tied embeddings that Trainer can save."""
    config = GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def make_trainer(
    folder: Path,
    *,
    model: Callable[[], nn.Module] = Net,
    data: type[Rows] = Rows,
    rows: int = 48,
    **arguments: Any,
) -> Trainer:
    torch.manual_seed(3)
    settings = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 3,
        "learning_rate": 0.01,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **arguments,
    }
    args = TrainingArguments(output_dir=str(folder / "out"), **settings)
    trainer = Trainer(model=model(), args=args, train_dataset=data(rows), eval_dataset=data(8))
    trainer.remove_callback(PrinterCallback)
    return trainer


def scar(trainer: Trainer, folder: Path, **options: Any) -> ScarCallback:
    """Train with a ScarCallback whose store keeps up."""
    callback = ScarCallback(trainer, **{"store": folder / "store", **EXACT, **grouped(**options)})
    trainer.add_callback(callback)
    trainer.add_callback(Drained(callback))
    return callback


def ended_at(
    folder: Path,
    event: str,
    step: int,
    signum: int,
    *,
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> None:
    """Run in a forked process, which `signum` ends at an event after `step` steps."""

    def body(_: Any) -> None:
        trainer = make_trainer(folder, **arguments)
        scar(trainer, folder, **(options or {}))

        def end() -> None:
            os.kill(os.getpid(), signum)
            time.sleep(20)  # a flush lets the signal through

        trainer.add_callback(At(event, step, end))
        trainer.train()

    with Forked(body) as child:
        assert child.wait() == -signum


def resumed(
    folder: Path, *, options: dict[str, Any] | None = None, **arguments: Any
) -> tuple[Trainer, ScarCallback]:
    """Run the same command again until its end."""
    trainer = make_trainer(folder, **arguments)
    callback = scar(trainer, folder, **(options or {}))
    trainer.train()
    return trainer, callback


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return the complete state, to be compared bit for bit."""
    return whole_state(trainer.model, getattr(trainer.optimizer, "optimizer", trainer.optimizer))


def log_of(trainer: Trainer) -> list[dict[str, float]]:
    """Return the log without entries that depend on time, or on where the mean of the losses began."""
    left_out = {"loss", "train_loss", "train_runtime", "eval_runtime"}
    return [
        {k: v for k, v in entry.items() if k not in left_out and not k.endswith("_per_second")}
        for entry in trainer.state.log_history
    ]


def main() -> None:
    """Run one rank: first without scarctl, then with scarctl, where rank 1 is killed once."""
    given = json.loads(sys.argv[1])
    out, rank = Path(given["out"]), int(os.environ["RANK"])
    # An evaluation draws random numbers after a step: with several ranks only those of the step's end are
    # saved.
    arguments = {
        "ddp_backend": "gloo",
        "ddp_find_unused_parameters": False,
        "eval_strategy": "no",
        "rows": 96,
    }
    whole = make_trainer(out / f"whole{rank}", **arguments)
    whole.train()
    expected = state_of(whole)
    arena, killed = Path(given["arena"], str(rank)), out / "killed"
    arena.mkdir(exist_ok=True)
    trainer = make_trainer(out / f"out{rank}", **arguments)
    mode = "rollback" if killed.exists() else "partial"
    callback = scar(trainer, out, store=given["store"], arena_dir=arena, mode=mode)

    def die() -> None:
        if rank == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.add_callback(At("on_step_end", given["kill_at"], die))
    trainer.train()
    assert callback.resumed is not None
    resumed = [callback.resumed.step, callback.resumed.consistent]
    torch.save({"whole": expected, "state": state_of(trainer), "resumed": resumed}, out / f"{rank}.pt")


if __name__ == "__main__":
    main()
