"""Train a recommender with Lightning, and scarctl beside it: two lines more.

python examples/lightning_recommender/train.py --store run
python examples/lightning_recommender/train.py --kill

With --kill it starts itself, kills that process with SIGKILL in the middle of its second epoch, starts it again with
the same command, and says what was lost; and trains once without being killed, to compare.
"""

from __future__ import annotations

import argparse
import logging
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from data import visits
from model import Recommender
from torch.utils.data import DataLoader

from scarctl_adapters.lightning import ScarCallback

BATCH = 256
SAID_EVERY = 20


class Says(pl.Callback):
    """Says where training is, one line per so many batches."""

    def __init__(self, saving: ScarCallback) -> None:
        self._saving = saving

    def on_train_start(self, trainer: Any, net: Any) -> None:
        """See `Callback`."""
        resumed = self._saving.resumed
        if resumed is not None and resumed.step:
            exactly = "exact" if resumed.exact else "perturbed, partitions of several steps"
            print(f"resumed after step {resumed.step} ({exactly})", flush=True)

    def on_train_batch_end(self, trainer: Any, net: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """See `Callback`."""
        if (batch_idx + 1) % SAID_EVERY == 0:
            loss = float(trainer.callback_metrics["loss"])
            print(
                f"epoch {trainer.current_epoch + 1}, batch {batch_idx + 1} of {trainer.num_training_batches}, "
                f"step {trainer.global_step}: loss {loss:.3f}",
                flush=True,
            )

    def on_validation_end(self, trainer: Any, net: Any) -> None:
        """See `Callback`."""
        if not trainer.sanity_checking:
            found = float(trainer.callback_metrics["found"])
            print(f"epoch {trainer.current_epoch + 1}: {found:.1%} of the held out items found", flush=True)


def train(arguments: argparse.Namespace) -> None:
    """What a user's script does."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pl.seed_everything(0, verbose=False)
    training, held_out, items = visits(arguments.items, arguments.pairs)
    saving = ScarCallback(store=arguments.store, interval=10, shards=8)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=arguments.epochs,
        callbacks=[saving, Says(saving)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    net = Recommender(items)
    trainer.fit(
        net,
        DataLoader(training, batch_size=BATCH, shuffle=True),
        DataLoader(held_out, batch_size=BATCH),
    )
    print(f"done: step {trainer.global_step}, epoch {trainer.current_epoch}", flush=True)


def kill(arguments: argparse.Namespace, folder: Path) -> None:
    """Kill a training in the middle of its second epoch, start it again, compare."""
    batches = arguments.pairs // BATCH
    middle = max(SAID_EVERY, batches // 2 // SAID_EVERY * SAID_EVERY)
    store = folder / "run"
    before = _run(arguments, store, until=f"epoch 2, batch {middle} ")
    after = _run(arguments, store)
    undisturbed = _run(arguments, folder / "undisturbed", quiet=True)
    died, again = _step(before[-1]), _first_step(after)
    print(f"killed at step {died}, in the middle of an epoch")
    print(f"went on after step {again}: {died - again} of {died} steps were made twice")
    print(f"in the end: {_found(after)}; undisturbed: {_found(undisturbed)}")


def _run(
    arguments: argparse.Namespace, store: Path, *, until: str | None = None, quiet: bool = False
) -> list[str]:
    """Train in another process, and kill it when it says `until`. Returns its lines."""
    command = [sys.executable, __file__, "--store", str(store), "--epochs", str(arguments.epochs)]
    command += ["--pairs", str(arguments.pairs), "--items", str(arguments.items)]
    if not quiet:
        print(f"$ python {Path(__file__).name} --store {store.name}", flush=True)
    started, lines = time.perf_counter(), []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line.rstrip())
            if not quiet:
                print(f"  {line}", end="", flush=True)
            if until is not None and line.startswith(until):
                child.send_signal(signal.SIGKILL)
                print(f"  kill -9 {child.pid}", flush=True)
                break
        else:
            if child.wait() or until is not None:
                sys.exit("that training did not end as it should")
    if not quiet:
        print(f"  ({time.perf_counter() - started:.0f} s)\n", flush=True)
    return lines


def _step(line: str) -> int:
    return int(line.partition("step ")[2].partition(":")[0])


def _first_step(lines: list[str]) -> int:
    return int(next(line for line in lines if line.startswith("resumed")).split()[3])


def _found(lines: list[str]) -> str:
    return [line.partition(": ")[2] for line in lines if "found" in line][-1]


def main() -> None:
    """Train, or kill a training."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--store", type=Path, help="where to save; needed without --kill")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=40_000, help="train on so many")
    parser.add_argument("--items", type=int, default=10_000, help="recommend the most frequent ones")
    parser.add_argument("--kill", action="store_true", help="kill a training and start it again")
    arguments = parser.parse_args()
    if arguments.kill:
        if arguments.epochs < 2 or arguments.pairs < 2 * SAID_EVERY * BATCH:
            parser.error(f"--kill needs two epochs, and {2 * SAID_EVERY * BATCH} pairs")
        with tempfile.TemporaryDirectory(prefix="scarctl-recommender-") as folder:
            kill(arguments, Path(folder))
    elif arguments.store is None:
        parser.error("--store is missing")
    else:
        train(arguments)


if __name__ == "__main__":
    main()
