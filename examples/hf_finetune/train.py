"""Train with Hugging Face's Trainer on the source of Python's standard library. scarctl takes two lines more.

    python examples/hf_finetune/train.py --store run            # all of a small GPT-2, from random values
    python examples/hf_finetune/train.py --store run --lora     # adapters on a frozen base, with peft
    python examples/hf_finetune/train.py --store run --kill     # kill -9 half way, run the same command again

Nothing is downloaded: a character is a token.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a model this small is slower with more

LENGTH, BATCH, INTERVAL = 32, 8, 4


def main() -> None:
    """Train, or continue, until `--steps` are done."""
    arguments = _parse()
    if arguments.kill:
        kill_and_run_again(arguments)
    else:
        train(arguments)


def train(arguments: argparse.Namespace) -> None:
    """Run the whole program, but for its argument `--kill`."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from scarctl_adapters.transformers import ScarCallback

    class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        """A megabyte of Python in pieces of LENGTH characters: int64 of shape (LENGTH,)."""

        def __init__(self) -> None:
            files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
            text = bytearray(b"".join(file.read_bytes() for file in files)[: 1 << 20])
            self.pieces = torch.frombuffer(text, dtype=torch.uint8)[: len(text) // LENGTH * LENGTH].view(
                -1, LENGTH
            )

        def __len__(self) -> int:
            return len(self.pieces)

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            piece = self.pieces[index].long()
            return {"input_ids": piece, "labels": piece}

    class Told(TrainerCallback):  # type: ignore[misc]
        """Says after which step the process is."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            print(f"step {state.global_step}", flush=True)

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=LENGTH,
            n_embd=64,
            n_layer=2,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
            loss_type="ForCausalLM",
        )
    )
    if arguments.lora:
        import peft

        config = peft.LoraConfig(
            r=8, target_modules=["c_attn", "c_proj", "c_fc"], task_type="CAUSAL_LM", fan_in_fan_out=True
        )
        model = peft.get_peft_model(model, config)
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=str(arguments.store / "hf"),
            max_steps=arguments.steps,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=Text(),
        callbacks=[Told],
    )
    callback = ScarCallback(trainer, store=arguments.store / "scar", fraction=1 / 8, interval=INTERVAL)
    trainer.add_callback(callback)
    result = trainer.train()
    resumed = callback.resumed
    assert resumed is not None
    restored = resumed.report.to_json()["bytes"] if resumed.report is not None else 0
    print(f"resumed {resumed.step} {'consistent' if resumed.consistent else 'mixed'} {restored}")
    print(f"done {result.global_step} {_loss(trainer):.4f}", flush=True)


def _loss(trainer: Any) -> float:
    """Return the last mean loss that was logged."""
    return next(float(entry["loss"]) for entry in reversed(trainer.state.log_history) if "loss" in entry)


def kill_and_run_again(arguments: argparse.Namespace) -> None:
    """Three runs: one undisturbed, one that is killed with -9, and the same command again. Says what was lost."""
    half = arguments.steps * 5 // 8
    print(f"undisturbed: {arguments.steps} steps", flush=True)
    _, whole = _run(arguments, arguments.store / "undisturbed", None)
    print(f"killed with -9 after step {half}, and run again", flush=True)
    killed, _ = _run(arguments, arguments.store / "killed", half)
    started = time.monotonic()
    _, found = _run(arguments, arguments.store / "killed", None)
    seconds = time.monotonic() - started
    step, kind, restored = found["resumed"]
    again = killed - int(step)
    print(
        f"it had taken {killed} steps and continued after step {step} ({kind}), {int(restored) / 1e3:.1f} kB restored\n"
        f"{again} steps were taken again; without scarctl and without a checkpoint of the Trainer: {killed}\n"
        f"the second run took {seconds:.1f} s, most of it importing\n"
        f"loss at the end: {found['done'][1]}, undisturbed {whole['done'][1]}"
    )


def _run(
    arguments: argparse.Namespace, store: Path, kill_after: int | None
) -> tuple[int, dict[str, list[str]]]:
    """Run this program in a process. Return the last step that it reported, and its last lines by their first word."""
    command = [sys.executable, __file__, "--store", str(store), "--steps", str(arguments.steps)]
    command += ["--lora"] * arguments.lora
    reported: dict[str, list[str]] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            word, _, rest = line.strip().partition(" ")
            reported[word] = rest.split()
            if word == "step" and int(rest) == kill_after:
                process.send_signal(signal.SIGKILL)
    if process.returncode != (0 if kill_after is None else -signal.SIGKILL):
        sys.exit(f"the training process ended with {process.returncode}")
    return int(reported.get("step", ["0"])[0]), reported


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", type=Path, required=True, help="folder for the checkpoints")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--lora", action="store_true", help="train adapters on a frozen base")
    parser.add_argument("--kill", action="store_true", help="kill the run with -9, and run it again")
    return parser.parse_args()


if __name__ == "__main__":
    main()
