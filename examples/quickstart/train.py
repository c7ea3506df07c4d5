"""Train with an ordinary script and scarctl: kill it, start it again, and it continues.

python examples/quickstart/train.py --store run
"""

from __future__ import annotations

import argparse
from pathlib import Path

from data import load
from model import Batches, build, evaluate, train_step

import scarctl

BATCH = 256
REPORT_EVERY = 20


def main() -> None:
    """Train, or continue, until `--iterations` are done."""
    arguments = _parse()
    images = load(arguments.data, arguments.images)
    model, optimizer = build(images, arguments.seed)
    batches = Batches(images, arguments.seed, BATCH)

    with scarctl.attach(
        model, optimizer, store=arguments.store, interval=10, partitioning=scarctl.Partitioning(shards=8)
    ) as session:
        resumed = session.resume()
        if resumed.report is None:
            print(f"{images}; a new run", flush=True)
        else:
            label = "exact" if resumed.exact else f"not exact: {'; '.join(resumed.reasons)}"
            print(f"{images}; resumed after iteration {resumed.step} ({label})", flush=True)

        for iteration in range(resumed.step + 1, arguments.iterations + 1):
            loss = train_step(model, optimizer, batches[iteration])
            if iteration % REPORT_EVERY == 0:
                print(f"iteration {iteration}: loss {loss:.3f}", flush=True)

    loss, right = evaluate(model, images)
    print(f"done: {arguments.iterations} iterations, loss {loss:.3f}, {right:.1%} right", flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", type=Path, required=True, help="folder for the checkpoints")
    parser.add_argument("--iterations", type=int, default=240)
    parser.add_argument("--data", type=Path, help="folder with MNIST or Fashion-MNIST (default: digits)")
    parser.add_argument(
        "--images", type=int, default=2000, help="train on this many images (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
