"""A small run of Hugging Face's Trainer, as a program: python -m tests.adapters.trainer_program JSON.

A model of tens of parameters with dropout, shuffled data, two batches per step, a schedule, evaluation. It writes its
whole state, bit for bit, into `out` at the end. `kill` ends it with SIGKILL, at an event of the Trainer.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from scarctl_adapters.transformers import ScarCallback


class Net(nn.Module):
    """Dropout, batch norm, and an embedding that shares its weights with the output."""

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
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"ids": torch.tensor(index % 16), "labels": torch.tensor(index * 7 % 16)}


class Killer(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Ends the process at an event after some steps, when what was handed over is durable."""

    def __init__(self, event: str, step: int, number: int, callback: ScarCallback | None) -> None:
        self.step, self.number, self.callback = step, number, callback
        setattr(self, event, self.end)

    def end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            session = self.callback.session if self.callback is not None else None
            if session is not None and session._engine is not None:
                session._engine.saver.drain(30)
            os.kill(os.getpid(), self.number)


def make_trainer(folder: Path, *, rows: int = 44, **arguments: Any) -> Trainer:
    """U = 6 steps in an epoch of 11 batches, two of them in a step, the last of one."""
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
        "metric_for_best_model": "loss",
        "load_best_model_at_end": False,
        **arguments,
    }
    args = TrainingArguments(output_dir=str(folder), **settings)
    return Trainer(model=Net(), args=args, train_dataset=Rows(rows), eval_dataset=Rows(8))


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Parameters, buffers, moments, counts, learning rates and generators, to compare bit for bit."""
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    state = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    for number, slots in optimizer.state_dict()["state"].items():
        state |= {f"{number}.{key}": torch.as_tensor(value).clone() for key, value in slots.items()}
    state["lr"] = torch.tensor([group["lr"] for group in optimizer.param_groups], dtype=torch.float64)
    state["torch"] = torch.get_rng_state()
    return state


def log_of(trainer: Trainer) -> list[dict[str, float]]:
    """The log without what depends on time, and on where the mean of the losses began."""
    left_out = {"loss", "train_loss", "train_runtime", "eval_runtime"}
    return [
        {k: v for k, v in entry.items() if k not in left_out and not k.endswith("_per_second")}
        for entry in trainer.state.log_history
    ]


def main() -> None:
    given = json.loads(sys.argv[1])
    trainer = make_trainer(Path(given["folder"]) / "out", **given.get("arguments", {}))
    if given.get("stopping"):
        trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=given["stopping"]))
    callback = None
    if given.get("scar") is not None:
        callback = ScarCallback(trainer, store=f"{given['folder']}/store", **given["scar"])
        trainer.add_callback(callback)
    if "kill" in given:
        trainer.add_callback(Killer(*given["kill"], callback))
    result = trainer.train(**given.get("train", {}))
    resumed = callback.resumed.step if callback is not None and callback.resumed is not None else 0
    torch.save({"state": state_of(trainer), "log": log_of(trainer), "resumed": resumed, "step": result.global_step,
                "stopper": [cb.early_stopping_patience_counter for cb in trainer.callback_handler.callbacks
                            if isinstance(cb, EarlyStoppingCallback)]}, given["out"])  # fmt: skip


if __name__ == "__main__":
    main()
