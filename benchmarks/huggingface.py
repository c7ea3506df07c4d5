"""Measure the time per step under Hugging Face's Trainer and Accelerate: bare, with scarctl, with their own
checkpoints.

python benchmarks/huggingface.py [--rounds 5] [--width 192] [--folder DIR]

A GPT-2 of four layers with AdamW, from random values; two batches per step under the Trainer, one under Accelerate.
Each arm runs 2 steps that are not measured and then 32 that are. scarctl saves 1/8 of the state every 4 steps; the
Trainer (`save_steps`) and Accelerate (`save_state`) save all of it once in 32: the same bytes per time. Writes
that scarctl has not finished after the 32 steps are not waited for, because they run alongside training.

One line per arm: time per step relative to the bare framework's of the same round (median and range over rounds); the
same of the processor's time of the training thread, on which other work on the machine has little influence;
milliseconds per step; and lines that a user adds to the program.
"""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from timing import arenas, interleaved, parser, print_table, scratch, settle, spread
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import scarctl
from scarctl_adapters.accelerate import attach_and_resume
from scarctl_adapters.transformers import ScarCallback

WARM, STEPS, INTERVAL, FULL, LENGTH, BATCH = 2, 32, 4, 8, 64, 2
LINES = {"bare": "", "scarctl": "2", "own": "1", "Accelerate, scarctl": "4, 2 changed"}


class Clock:
    """Seconds of the measured steps."""

    def __init__(self, ready: Callable[[], object] = lambda: None) -> None:
        self.ready, self.seconds, self.busy = ready, 0.0, 0.0
        self.started = self.began = 0.0

    def after(self, step: int) -> None:
        """Note that a step is over."""
        if step == WARM:
            self.ready()
            self.started, self.began = time.perf_counter(), time.thread_time()
        elif step == WARM + STEPS:
            self.seconds, self.busy = time.perf_counter() - self.started, time.thread_time() - self.began


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Noise: what is learned does not matter here."""

    def __len__(self) -> int:
        return (WARM + STEPS + 1) * BATCH * 2

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(256, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class Timed(TrainerCallback):  # type: ignore[misc]
    """Reports to a clock at the next step, when all work of the last one is done."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.clock.after(state.global_step)


def model(width: int) -> GPT2LMHeadModel:
    """Return a GPT-2 of four layers."""
    torch.manual_seed(0)
    sizes = {"n_positions": LENGTH, "n_embd": width, "n_layer": 4, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **sizes))


def drained(session: Any) -> None:
    """Wait until the first checkpoint, of everything, is durable."""
    if session is not None and session._engine is not None:
        session._engine.saver.drain(60)


def with_trainer(folder: Path, arena: str, width: int, kind: str) -> Clock:
    """Train STEPS steps."""
    with scratch(folder) as place:
        args = TrainingArguments(
            output_dir=str(place / "out"),
            max_steps=WARM + STEPS + 1,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=2,
            save_strategy="steps" if kind == "own" else "no",
            save_steps=STEPS,
            logging_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(model(width), args, train_dataset=Texts())
        trainer.remove_callback(PrinterCallback)
        clock = Clock()
        if kind == "scarctl":
            callback = ScarCallback(
                trainer,
                store=place / "store",
                settings=scarctl.Settings(arena_dir=arena),
                fraction=1 / FULL,
                interval=INTERVAL,
            )
            trainer.add_callback(callback)
            clock.ready = lambda: drained(callback.session)
        trainer.add_callback(Timed(clock))
        trainer.train()
        settle()
        return clock


def with_accelerate(folder: Path, arena: str, width: int, kind: str) -> Clock:
    """Train STEPS steps."""
    for shared in (AcceleratorState, GradientState, PartialState):
        shared._reset_state()
    with scratch(folder) as place:
        accelerator = Accelerator(cpu=True)
        network = model(width)
        optimizer = torch.optim.AdamW(network.parameters())
        loader = torch.utils.data.DataLoader(Texts(), batch_size=BATCH)
        network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
        run, clock = None, Clock()
        if kind == "scarctl":
            run = attach_and_resume(
                accelerator,
                store=place / "store",
                fraction=1 / FULL,
                interval=INTERVAL,
                settings=scarctl.Settings(arena_dir=arena),
            )
            clock.ready = lambda: drained(run.session)
        for step, batch in enumerate(run.batches(loader) if run is not None else loader):
            clock.after(step)
            if step == WARM + STEPS:
                break
            accelerator.backward(network(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            if kind == "own" and step + 1 == STEPS:
                accelerator.save_state(str(place / "state"))
        if run is not None:
            run.close()
        settle()
        return clock


def main() -> None:
    """Print one line per arm."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--width", type=int, default=192)
    arguments = options.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    nbytes = 3 * sum(p.nbytes for p in model(arguments.width).parameters())
    print(f"state: {nbytes / 1e6:.1f} MB; transformers {transformers.__version__}")
    busy: dict[str, list[float]] = {}
    with arenas(arguments.folder) as arena:

        def measured(name: str, run: Callable[..., Clock], kind: str) -> float:
            clock = run(arguments.folder, arena, arguments.width, kind)
            busy.setdefault(f"{name}, {kind}", []).append(clock.busy)
            return clock.seconds

        cases = {
            f"{name}, {kind}": functools.partial(measured, name, run, kind)
            for name, run in (("Trainer", with_trainer), ("Accelerate", with_accelerate))
            for kind in ("bare", "scarctl", "own")
        }
        seconds = interleaved(cases, arguments.rounds)
    rows = []
    for case, taken in seconds.items():
        framework, _, kind = case.partition(", ")
        base = f"{framework}, bare"
        ratios = [t / b for t, b in zip(taken, seconds[base], strict=True)]
        shares = [t / b for t, b in zip(busy[case], busy[base], strict=True)][1:]  # the first round warms up
        lines = LINES.get(case, LINES[kind])
        rows.append([case, spread(ratios), spread(shares), spread(taken, STEPS / 1000, 1), lines])
    print_table(["arm", "of the bare time", "of its thread's", "ms per step", "lines added"], rows)


if __name__ == "__main__":
    main()
