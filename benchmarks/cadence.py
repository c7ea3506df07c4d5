"""Simulate intervals that follow failures, on spot machines that die by day more than by night.

    python benchmarks/cadence.py

A checkpoint costs C seconds and a failure half an interval, so at rate r the cheapest interval is sqrt(2C/r) (Young,
1974). The rate is estimated from the failures so far: the mean of a Gamma posterior whose evidence halves every so many
hours. The costs are ratios to those of knowing the rate of every moment, which no run does.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
from timing import print_table

HOUR = 3600.0
MINUTE = 60.0
TRACES = ((1, 12), (0.5, 4), (2, 24), (3, 6))
"""Mean hours between failures by day and by night, 12 hours each."""
PRIOR_HOURS = 4.0
"""Mean time between failures that is expected before the first: as much evidence as one failure."""


def simulate(
    day: float, night: float, cost: float, halving: float, budget: float, days: int, seed: int
) -> list[float]:
    """Return the costs of the posterior, of the mean rate, and of a budget of time, over that of the true rate.

    day, night: mean hours between failures. cost: seconds per checkpoint. halving: hours, inf to keep all evidence.
    budget: share of the time that is spent on checkpoints, whatever the failures.
    """
    count = int(days * 24 * HOUR / MINUTE)
    hour = np.arange(count) * MINUTE / HOUR % 24
    rates = np.where(hour < 12, 1 / (day * HOUR), 1 / (night * HOUR))
    failures = np.random.default_rng(seed).random(count) < rates * MINUTE
    kept = 0.5 ** (MINUTE / (halving * HOUR))
    seen, time, paid = 0.0, 0.0, 0.0
    for rate, failed in zip(rates.tolist(), failures.tolist(), strict=True):
        paid += share(cost, math.sqrt(2 * cost * (PRIOR_HOURS * HOUR + time) / (1 + seen)), rate)
        seen, time = seen * kept + failed, time * kept + MINUTE
    best = float(np.mean(np.sqrt(2 * cost * rates)))
    mean = share(cost, math.sqrt(2 * cost / float(rates.mean())), float(rates.mean()))
    return [paid / count / best, mean / best, share(cost, cost / budget, float(rates.mean())) / best, best]


def share(cost: float, interval: float, rate: float) -> float:
    """Return the share of the time that goes to checkpoints and to what failures undo."""
    return cost / interval + rate * interval / 2


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--days", type=int, default=60)
    options.add_argument("--seeds", type=int, default=10)
    options.add_argument("--cost", type=float, default=0.05, help="seconds per checkpoint")
    options.add_argument("--budget", type=float, default=0.01)
    args = options.parse_args()
    rows = []
    for day, night in TRACES:
        for halving in (6.0, 24.0, math.inf):
            found = np.array(
                [
                    simulate(day, night, args.cost, halving, args.budget, args.days, seed)
                    for seed in range(args.seeds)
                ]
            )
            error = found[:, 0].std(ddof=1) / math.sqrt(len(found))
            _, mean, budget, best = found.mean(0)
            rows.append(
                [
                    f"{day:g} h, {night:g} h",
                    "all" if math.isinf(halving) else f"{halving:g} h",
                    f"{found[:, 0].mean():.3f} ± {error:.3f}",
                    f"{mean:.3f}",
                    f"{budget:.2f}",
                    f"{best:.2%}",
                ]
            )
    heads = ["between failures, day, night", "evidence halves in", "posterior", "mean rate known"]
    print_table([*heads, f"a budget of {args.budget:.0%}", "share of time if the rate is known"], rows)


if __name__ == "__main__":
    main()
