"""Act one: half of the state is lost at one moment, and only that half is restored.

Three runs see the same batches: one that nothing happens to, one that loses half of its shards with scarctl beside it, and
one that loses them with full checkpoints and rolls back. The rework cost of a failure is the number of iterations more
than the first run that it takes to reach the same training loss (the iteration cost of Qiao et al., ICML 2019, section 3.1).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import scarctl
import torch
from data import Images
from model import Batches, Net, build, evaluate, train_step
from numpy.typing import NDArray
from scarctl.recovery import Report

SHARDS = 8
LOST = SHARDS // 2
FULL_EVERY = 32
"""Iterations between two full checkpoints (the paper's C)."""
FRACTION = 1 / 8
ITERATIONS = 160
"""The undisturbed run's. The loss to reach is the lowest that it has within its last interval."""
NEVER = 1 << 30


@dataclass(frozen=True, slots=True)
class Failure:
    """What happens to one seed's runs."""

    after: int
    """Iterations done when it happens."""
    shards: list[int]
    target: float
    """Training loss to reach afterwards."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of being prepared for a failure."""

    name: str
    every: int
    """Iterations between two checkpoints. Both arms write the same bytes per iteration."""
    full: bool
    recover: Callable[[scarctl.Session, list[int]], Report]


@dataclass(slots=True)
class Run:
    """A run that was disturbed."""

    iterations: int
    """All that were done until the target was reached, the repeated ones too."""
    saved_bytes: float
    """By checkpoints after the first, in every `FULL_EVERY` iterations before the failure."""
    report: Report


@dataclass(slots=True)
class Costs:
    """Rework costs of one arm, one per seed."""

    values: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        if len(self.values) == 1:
            return f"{self.values[0]} iterations (one seed says little)"
        low, high = _mean_interval(self.values)
        spread = f"95 % interval {low:.1f} to {high:.1f}, range {min(self.values)} to {max(self.values)}"
        return f"{np.mean(self.values):.1f} iterations on average ({spread})"


SCAR = Arm(
    "scarctl: 1/8 of the state every 4 iterations, restore the lost half",
    round(FULL_EVERY * FRACTION),
    False,
    lambda session, lost: session.recover(lost=lost),
)
ROLLBACK = Arm(
    "full checkpoints every 32 iterations, roll everything back",
    FULL_EVERY,
    True,
    lambda session, _: session.recover("all", mode="rollback"),
)


def play(images: Images, seeds: int, folder: Path) -> None:
    """Run act one and print what it cost. Stores go into `folder`."""
    print(f"Act one: {LOST} of {SHARDS} shards are lost, the process lives on.")
    print(f"A small CNN learns {images}; {seeds} seeds.")
    started = time.perf_counter()
    costs = {SCAR.name: Costs(), ROLLBACK.name: Costs()}
    saved = dict.fromkeys(costs, 0.0)
    for seed in range(seeds):
        undisturbed, failure = _plan(images, seed)
        if seed == 0:
            print(f"\n{'seed':>4}  {'fails after':>11}  {'undisturbed':>11}  {'scarctl':>8}  {'rollback':>8}")
        line = f"{seed:>4}  {failure.after:>11}  {undisturbed:>11}"
        for arm in (SCAR, ROLLBACK):
            run = _disturbed(images, seed, failure, arm, folder / f"{seed}-{'full' if arm.full else 'scar'}")
            costs[arm.name].values.append(run.iterations - undisturbed)
            saved[arm.name] += run.saved_bytes
            line += f"  {run.iterations - undisturbed:>+8}"
            if arm is SCAR and seed == 0:
                example = run.report
        print(line, flush=True)
    print("\nThe two columns on the right are rework costs: iterations more than undisturbed to the same training loss.")
    for name, cost in costs.items():
        print(f"  {name}:\n    {cost}; {saved[name] / seeds / 1e3:.0f} kB saved per {FULL_EVERY} iterations")
    wins = sum(a < b for a, b in zip(costs[SCAR.name].values, costs[ROLLBACK.name].values, strict=True))
    print(f"  scarctl was cheaper for {wins} of {seeds} seeds.")
    change = example.perturbation
    print(
        f"In the first: {example.restored_partitions} partitions restored ({example.bytes / 1e3:.0f} kB, "
        f"{_tiers(example)}) in {example.seconds * 1e3:.1f} ms; the rest was left alone; "
        + ("perturbation unknown." if change.value is None else f"perturbation {change.value:.3f} ({change.kind}).")
    )
    print(f"Act one took {time.perf_counter() - started:.0f} s.\n", flush=True)


def _plan(images: Images, seed: int) -> tuple[int, Failure]:
    """The undisturbed run: how many iterations it needs, and what the others will have to go through."""
    model, optimizer = build(images, seed)
    batches = Batches(images, seed)
    losses = {}
    for iteration in range(1, ITERATIONS + 1):
        train_step(model, optimizer, batches[iteration])
        if iteration > ITERATIONS - FULL_EVERY:
            losses[iteration] = evaluate(model, images)[0]
    reached = min(losses, key=losses.__getitem__)
    # Any place between two full checkpoints is as likely as any other: right before one a rollback costs most, right
    # after one nothing.
    chance = np.random.default_rng(seed)
    checkpoint = int(FULL_EVERY * chance.integers(1, ITERATIONS // FULL_EVERY - 1))
    after = checkpoint + int(chance.integers(1, FULL_EVERY + 1))
    lost = sorted(chance.choice(SHARDS, LOST, replace=False).tolist())
    return reached, Failure(after, lost, losses[reached])


def _disturbed(images: Images, seed: int, failure: Failure, arm: Arm, store: Path) -> Run:
    """Train, fail, recover, and go on until the target is reached."""
    model, optimizer = build(images, seed)
    batches = Batches(images, seed)
    # Usually `interval=4` does all. Here checkpoints are called by hand to wait for the disk: training is so fast that what
    # is still on its way would otherwise depend on the disk, and so would the numbers.
    session = scarctl.attach(
        model, optimizer, store=store, shards=SHARDS, seed=seed, fraction=FRACTION, interval=NEVER
    )
    done, saved_bytes, report = 0, 0.0, None
    while done < 4 * ITERATIONS:
        train_step(model, optimizer, batches[session.head_step + 1])
        done += 1
        if report is None:
            if done == 1:
                session.checkpoint(full=True, wait=True)
                first_bytes = session.stats.saved_bytes
            elif done % arm.every == 0:
                session.checkpoint(full=arm.full, wait=True)
            if done % FULL_EVERY == 0:
                saved_bytes = (session.stats.saved_bytes - first_bytes) / (done // FULL_EVERY)
            if done == failure.after:
                _poison(model, optimizer, session, failure.shards)
                report = arm.recover(session, failure.shards)
        elif evaluate(model, images)[0] <= failure.target:
            break
    else:
        sys.exit(f"seed {seed}: a loss of {failure.target:.3f} was not reached in {done} iterations")
    session.close(seal=False)
    assert report is not None
    return Run(done, saved_bytes, report)


@torch.no_grad()
def _poison(model: Net, optimizer: torch.optim.Optimizer, session: scarctl.Session, shards: list[int]) -> None:
    """Overwrite all that these shards hold, parameters and Adam's moments, with NaN: it is gone."""
    layout = session.store.current_layout()
    assert layout is not None
    settings = session.store.settings
    ids: NDArray[np.int64] = np.flatnonzero(np.isin(layout.shards(settings.shards, settings.seed), shards))
    parameters = dict(model.named_parameters())
    for group, start, stop in zip(layout.group_of(ids), *layout.row_ranges(ids), strict=True):
        parameter = parameters[layout.groups[group].name]
        for tensor in (parameter, optimizer.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg_sq"]):
            tensor[start:stop] = float("nan")


def _tiers(report: Report) -> str:
    return ", ".join(f"{count} from {tier}" for tier, count in report.tiers.items())


def _mean_interval(values: list[int]) -> tuple[float, float]:
    """95 % interval of the mean by bootstrap: a handful of costs is far from any normal distribution."""
    draws = np.random.default_rng(0).choice(values, (10_000, len(values)))
    low, high = np.percentile(draws.mean(axis=1), [2.5, 97.5])
    return float(low), float(high)
