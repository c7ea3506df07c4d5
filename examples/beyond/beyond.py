"""Measures models that the paper does not have, and writes docs/beyond.md.

python -m examples.beyond.beyond
python -m examples.beyond.beyond --quick --out build/beyond-quick

Every trial is kept in a folder: the same call again goes on where it was stopped, also with more --trials.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path

import torch

from examples.beyond import tables
from examples.beyond.studies import INTERVAL, PAIRS, SLOTS, studies
from examples.paper.studies import Runs

HERE = Path(__file__).parent


def main() -> None:
    """Measure what is not yet measured, then write."""
    arguments = _parse()
    torch.set_num_threads(1)  # sums in one order, as `scarctl simulate` has them
    runs = Runs(arguments.results, None if arguments.kept else arguments.trials)
    found: tables.Summaries = {}
    for pair in PAIRS:
        for name, study in studies(pair, quick=arguments.quick).items():
            if summary := runs.measure(pair, name, study):
                found.setdefault(pair.name, {})[name] = summary
    text = (
        (HERE / "template.md")
        .read_text(encoding="utf-8")
        .format(
            machine=f"{platform.machine()}, {os.cpu_count()} cores, shared; Python {platform.python_version()}, "
            f"PyTorch {torch.__version__}",
            interval=INTERVAL,
            rare=SLOTS * INTERVAL,
            policies=tables.policies(found),
            moments=tables.moments(found),
            sampled=tables.sampled(found),
        )
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "beyond.md").write_text(text, encoding="utf-8")
    print(
        f"{arguments.out / 'beyond.md'}; {runs.seconds:.0f} s of processor time for new trials",
        file=sys.stderr,
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=8, help="of the cheap ones; the others get 0.6 of it")
    parser.add_argument(
        "--results", type=Path, default=Path("build/beyond"), help="folder that keeps every trial"
    )
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder for beyond.md")
    parser.add_argument("--kept", action="store_true", help="run no trials, write about those that are kept")
    parser.add_argument(
        "--quick", action="store_true", help="a few iterations of everything: shows that it runs"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.trials, arguments.results = 2, arguments.out / "results"
    return arguments


if __name__ == "__main__":
    main()
