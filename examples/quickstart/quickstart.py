"""Show scarctl in two acts: lose half of a model and repair it while it trains; kill the process and start it again.

python examples/quickstart/quickstart.py
python examples/quickstart/quickstart.py --act 1 --data path/to/fashion-mnist --seeds 4
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path

import partial_failure
import process_dies
from data import load

SEEDS = 6
IMAGES = 2000


def main() -> None:
    """Play the acts that were asked for."""
    arguments = _parse()
    with ExitStack() as stack:
        if arguments.store is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="scarctl-quickstart-")))
            print(f"The stores are in {folder} and are removed at the end; --store DIR keeps them.\n")
        else:
            folder = arguments.store
            if folder.exists() and any(folder.iterdir()):
                raise SystemExit(f"{folder} is not empty: give --store a new folder")
            folder.mkdir(parents=True, exist_ok=True)
            print(f"The stores are in {folder}.\n")
        if arguments.act in ("1", "both"):
            partial_failure.play(load(arguments.data, arguments.images), arguments.seeds, folder / "act1")
        if arguments.act in ("2", "both"):
            iterations, kill_after = (60, 20) if arguments.quick else (240, 120)
            process_dies.play(folder / "run", arguments.data, arguments.images, iterations, kill_after)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--act", choices=["1", "2", "both"], default="both")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="repetitions of act one")
    parser.add_argument(
        "--data", type=Path, help="folder with MNIST or Fashion-MNIST; default: scikit-learn's digits"
    )
    parser.add_argument(
        "--images", type=int, default=IMAGES, help="train on this many images, the first ones"
    )
    parser.add_argument("--store", type=Path, help="new folder for the stores; default: a temporary one")
    parser.add_argument("--quick", action="store_true", help="one seed, and a shorter act two")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds = 1
    for name in ("seeds", "images"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} is {getattr(arguments, name)}: give 1 or more")
    return arguments


if __name__ == "__main__":
    main()
