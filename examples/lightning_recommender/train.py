"""Train a recommender with Lightning. scarctl takes two lines more.

python examples/lightning_recommender/train.py --store run
python examples/lightning_recommender/train.py --kill

The training is in fit.py. With --kill this starts itself, kills that process with SIGKILL in the middle of its second
epoch, starts it again with the same command, and says what was lost; and trains once undisturbed, to compare.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from data import BATCH, SAID_EVERY


def kill(arguments: argparse.Namespace, folder: Path) -> None:
    """Kill a training in the middle of its second epoch, start it again, compare."""
    batches = arguments.pairs // BATCH
    middle = max(SAID_EVERY, batches // 2 // SAID_EVERY * SAID_EVERY)
    store = folder / "run"
    before = _run(arguments, store, until=f"epoch 2, batch {middle} ")
    after = _run(arguments, store)
    undisturbed = [] if arguments.quick else _run(arguments, folder / "undisturbed", quiet=True)
    died, again = _step(before[-1]), _first_step(after)
    print(f"killed at step {died}, in the middle of an epoch")
    print(f"continued after step {again}: {died - again} of {died} steps were made twice")
    print(f"in the end: {_found(after)}{f'; undisturbed: {_found(undisturbed)}' if undisturbed else ''}")


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
    parser.add_argument(
        "--quick", action="store_true", help="with --kill: less data, and nothing to compare with"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.pairs, arguments.items = 2 * SAID_EVERY * BATCH, 2000
    if arguments.kill:
        if arguments.epochs < 2 or arguments.pairs < 2 * SAID_EVERY * BATCH:
            parser.error(f"--kill needs two epochs, and {2 * SAID_EVERY * BATCH} pairs")
        with tempfile.TemporaryDirectory(prefix="scarctl-recommender-") as folder:
            kill(arguments, Path(folder))
    elif arguments.store is None:
        parser.error("--store is missing")
    else:
        # Not above: Lightning takes seconds to import, and with --kill only other processes need it.
        from fit import train

        train(arguments.store, arguments.epochs, arguments.pairs, arguments.items)


if __name__ == "__main__":
    main()
