"""Measure models that the paper does not have, and write docs/beyond.md.

python -m examples.beyond.beyond
python -m examples.beyond.beyond --quick --out build/beyond-quick

Every trial is kept in a folder: the same call again continues where it was stopped, also with more --trials.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from examples.beyond import tables
from examples.beyond.studies import INTERVAL, PAIRS, SLOTS, SMOOTH, studies
from examples.paper import options
from examples.paper.markdown import ways
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
            machine=options.machine(),
            interval=INTERVAL,
            rare=SLOTS * INTERVAL,
            smooth=SMOOTH,
            policies=ways((pair.title, found[pair.name]["policies"]) for pair in PAIRS if pair.name in found),
            moments=tables.moments(found, runs),
            curved=tables.curved(found, runs),
            sampled=tables.sampled(found, runs),
        )
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "beyond.md").write_text(text, encoding="utf-8")
    print(
        f"{arguments.out / 'beyond.md'}; {runs.seconds:.0f} s of processor time for new trials",
        file=sys.stderr,
    )


def _parse() -> argparse.Namespace:
    parser = options.parser(
        __doc__,
        name="beyond",
        writes="beyond.md",
        trials=20,
        of="of every row",
    )
    return options.parse(parser)


if __name__ == "__main__":
    main()
