"""Show act one: half of the state is lost at one moment, and only that half is restored.

Three runs see the same batches: nothing happens to the first, the second loses half of its shards and has scarctl
restore them, the third loses them too, has full checkpoints, and rolls back. The rework cost of a failure is how many
iterations more than the first run it takes to reach the same training loss (the iteration cost of Qiao et al., ICML
2019, section 3.1).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from data import Images
from model import Batches, Net, build, evaluate, train_step

import scarctl
from scarctl.recovery.report import Report
from scarctl.simulate.intervals import mean_of

SHARDS = 8
LOST = SHARDS // 2
FULL_EVERY = 32
"""Iterations between two full checkpoints (the paper's C)."""
FRACTION = 1 / 8
PART_EVERY = 4
"""Iterations between two partial checkpoints: 1/8 of the state eight times as often is the same number of bytes."""
ITERATIONS = 160
"""The undisturbed run's."""
MEASURED_FROM = ITERATIONS - FULL_EVERY
"""The loss is measured after this many iterations. The one to reach is the undisturbed run's lowest from here on."""
BY_HAND = 1 << 30
"""An interval that never ends: checkpoints are called for."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of one seed's runs."""

    after: int
    """Iterations done when it happens."""
    shards: list[int]
    target: float
    """Training loss to reach afterwards."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run that was disturbed."""

    iterations: int
    """All that were done until the target was reached, the repeated ones too."""
    saved_bytes: float
    """By checkpoints after the first, per `FULL_EVERY` iterations."""
    report: Report


@dataclass(slots=True)
class Arm:
    """One way to be prepared for a failure, and what failures cost then."""

    name: str
    what: str
    every: int
    full: bool
    recover: Callable[[scarctl.Session, list[int]], Report]
    runs: list[Run] = field(default_factory=list)
    costs: list[int] = field(default_factory=list)
    """Rework costs, one per seed."""

    def __str__(self) -> str:
        kilobytes = np.mean([run.saved_bytes for run in self.runs]) / 1e3
        return f"{self.name:>8}: {_mean(self.costs)}; {kilobytes:.0f} kB saved per {FULL_EVERY} iterations"


def play(images: Images, seeds: int, folder: Path) -> None:
    """Run act one and print what it cost. Stores go into `folder`."""
    scar = Arm(
        "scarctl",
        f"keeps all of it in memory every {PART_EVERY} iterations, saves 1/8, and restores the lost half",
        PART_EVERY,
        False,
        lambda session, lost: session.recover(lost=lost),
    )
    rollback = Arm(
        "rollback",
        f"saves everything every {FULL_EVERY} iterations, and rolls everything back",
        FULL_EVERY,
        True,
        lambda session, lost: session.recover("all", mode="rollback"),
    )
    print(f"Act one: {LOST} of {SHARDS} shards are lost at one moment, the process lives on.\n")
    print(f"A small CNN learns {images}. What is lost becomes NaN, parameters and Adam's moments.")
    for arm in (scar, rollback):
        print(f"{arm.name:>8}  {arm.what}")
    print("\nRework cost: iterations more than undisturbed until the training loss is as low.\n")
    print("seed  undisturbed  fails after  scarctl  rollback", flush=True)

    started = time.perf_counter()
    for seed in range(seeds):
        undisturbed, failure = _plan(images, seed)
        for arm in (scar, rollback):
            run = _disturbed(images, seed, failure, arm, folder / arm.name / str(seed))
            arm.runs.append(run)
            arm.costs.append(run.iterations - undisturbed)
        print(
            f"{seed:>4}  {undisturbed:>11}  {failure.after:>11}  {scar.costs[-1]:>+7}  {rollback.costs[-1]:>+8}",
            flush=True,
        )

    wins = sum(a < b for a, b in zip(scar.costs, rollback.costs, strict=True))
    print(f"\n{scar}\n{rollback}\nscarctl was cheaper for {wins} of {seeds} seeds.")
    print(f"Its last report: {_line(scar.runs[-1].report)}")
    print(f"Act one took {time.perf_counter() - started:.0f} s.\n", flush=True)


def _plan(images: Images, seed: int) -> tuple[int, Failure]:
    """Train undisturbed. Return the number of iterations that it needs, and the failure of the other runs."""
    model, optimizer = build(images, seed)
    batches = Batches(images, seed)
    losses = {}
    for iteration in range(1, ITERATIONS + 1):
        train_step(model, optimizer, batches[iteration])
        if iteration > MEASURED_FROM:
            losses[iteration] = evaluate(model, images)[0]
    reached = min(losses, key=losses.__getitem__)
    # Any place between two full checkpoints is as likely as any other: right before one a rollback costs most, right
    # after one nothing.
    chance = np.random.default_rng(seed)
    checkpoint = FULL_EVERY * int(chance.integers(1, MEASURED_FROM // FULL_EVERY))
    after = checkpoint + int(chance.integers(1, FULL_EVERY + 1))
    lost = sorted(chance.choice(SHARDS, LOST, replace=False).tolist())
    return reached, Failure(after, lost, losses[reached])


def _disturbed(images: Images, seed: int, failure: Failure, arm: Arm, store: Path) -> Run:
    """Train, fail, recover, and continue until the target is reached."""
    model, optimizer = build(images, seed)
    batches = Batches(images, seed)
    # A real loop gives `interval=4` and calls nothing. This one is so fast that a disk may not follow, and then some
    # partitions are skipped. So it waits, for the numbers to be the same on every disk.
    session = scarctl.attach(
        model,
        optimizer,
        store=store,
        partitioning=scarctl.Partitioning(shards=SHARDS, seed=seed),
        fraction=FRACTION,
        interval=BY_HAND,
    )
    for done in range(1, 4 * ITERATIONS):
        # The session counts iterations, and a rollback takes its count back: so batches are repeated too.
        train_step(model, optimizer, batches[session.head_step + 1])
        if done == 1:
            session.checkpoint(full=True, wait=True)
            first_bytes = session.stats.saved_bytes
        if done <= failure.after and done % arm.every == 0:
            session.checkpoint(full=arm.full, wait=True)
        if done == failure.after // FULL_EVERY * FULL_EVERY:
            saved_bytes = (session.stats.saved_bytes - first_bytes) * FULL_EVERY / done
        if done == failure.after:
            _poison(model, optimizer, session, failure.shards)
            report = arm.recover(session, failure.shards)
        elif done > MEASURED_FROM and evaluate(model, images)[0] <= failure.target:
            session.close(seal=False)
            return Run(done, saved_bytes, report)
    sys.exit(f"seed {seed}: a loss of {failure.target:.3f} was not reached in {done} iterations")


@torch.no_grad()
def _poison(
    model: Net, optimizer: torch.optim.Optimizer, session: scarctl.Session, shards: list[int]
) -> None:
    """Overwrite all rows that belong to these shards with NaN, parameters and moments: they are gone."""
    layout = session.store.current_layout()
    assert layout is not None
    shard_of = layout.shards(session.store.settings.shards, session.store.settings.seed)
    ids = np.flatnonzero(np.isin(shard_of, shards))
    parameters = dict(model.named_parameters())
    for group, start, stop in zip(layout.group_of(ids), *layout.row_ranges(ids), strict=True):
        parameter = parameters[layout.groups[group].name]
        moments = optimizer.state[parameter]
        for tensor in (parameter, moments["exp_avg"], moments["exp_avg_sq"]):
            tensor[start:stop] = float("nan")


def _mean(costs: list[int]) -> str:
    """Mean and range, and the mean's interval from five runs on."""
    if len(costs) == 1:
        return f"{costs[0]} iterations (one seed says little)"
    mean = mean_of(np.array(costs, dtype=np.float64))
    interval = "" if mean.low is None else f"95 % interval {mean.low:.1f} to {mean.high:.1f}, "
    return f"{mean.mean:.1f} iterations on average ({interval}range {min(costs)} to {max(costs)})"


def _line(report: Report) -> str:
    tiers = ", ".join(f"{count} from {tier}" for tier, count in report.tiers.items())
    value, kind = report.perturbation.value, report.perturbation.kind
    change = "unknown" if value is None else f"{value:.3f} ({kind})"
    size = f"{report.bytes / 1e3:.0f} kB"
    return f"{report.restored_partitions} partitions restored ({size}; {tiers}), perturbation {change}."
