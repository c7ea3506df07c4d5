"""Measure the gain of extrapolating recovery in real sessions, and its cost.

python benchmarks/extrapolation.py [--only NAME] [--seeds 10] [--mb 128] [--rounds 7]

First table: trainings on data made from a seed and on scikit-learn's digits, each with two sessions that save alike;
one of them has `extrapolate=True`. At the same random moment both lose the same 4 of 8 shards and recover. "kept": the
squared perturbation with extrapolation as a share of that without it, over all seeds; "reported": what the
reports say, 1 - expected gain. "rework": additional iterations until the training loss is as low as undisturbed, mean
and standard error; of the difference, too. "unknown": lost partitions whose movement was not known.

Second table: the time of one checkpoint's copy with and without it, interleaved in one process, and the memory that it
takes.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import arenas, interleaved, parser, print_table, ratio, scratch, spread
from torch import nn
from torch.nn import functional

import scarctl
from scarctl.arena.header import MOVEMENTS
from scarctl.checkpoint.copied import Extent
from scarctl.checkpoint.step_end import captured

SHARDS, LOST = 8, 4
ITERATIONS = 240
MEASURED_FROM = 200
PATIENCE = 2
SAVES = {"all every 32": (1.0, 32), "1/8 every 4": (1 / 8, 4)}


@dataclass
class Training:
    """A model, its optimizer, the loss of iteration k, and the loss over all data."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch_loss: Callable[[int], torch.Tensor]
    whole_loss: Callable[[], torch.Tensor]
    rows: dict[str, int]

    def step(self, iteration: int) -> None:
        self.optimizer.zero_grad()
        self.batch_loss(iteration).backward()
        self.optimizer.step()

    @torch.no_grad()
    def loss(self) -> float:
        return float(self.whole_loss())


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.from_numpy(found.images.astype(np.float32) / 16), torch.from_numpy(found.target)


def classifier(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, size: int) -> Training:
    pixels, labels = digits()
    pixels = pixels.unsqueeze(1)

    def batch_loss(iteration: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed * 100_003 + iteration)
        some = torch.randint(len(labels), (size,), generator=generator)
        return functional.cross_entropy(model(pixels[some]), labels[some])

    return Training(model, optimizer, batch_loss, lambda: functional.cross_entropy(model(pixels), labels), {})


def mlr(seed: int) -> Training:
    """Multinomial logistic regression by SGD, as in the paper."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    return classifier(model, torch.optim.SGD(model.parameters(), lr=0.1), seed, 256)


def cnn(seed: int) -> Training:
    """Return the quickstart's network, with Adam."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "quickstart"))
    from model import LEARNING_RATE, Net

    torch.manual_seed(seed)
    model = Net(8)
    return classifier(model, torch.optim.Adam(model.parameters(), lr=LEARNING_RATE), seed, 64)


def factors(seed: int) -> Training:
    """Matrix factorisation: two tables, a row a partition, by SGD with momentum on some of the entries."""
    torch.manual_seed(seed)
    users, items, rank = 200, 150, 8
    truth = torch.randn(users, rank) @ torch.randn(rank, items) / rank**0.5
    seen = torch.rand(users, items) < 0.2
    model = nn.Module()
    model.users, model.items = nn.Embedding(users, rank), nn.Embedding(items, rank)
    for table in (model.users, model.items):
        nn.init.normal_(table.weight, std=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.5)

    def whole() -> torch.Tensor:
        wrong = (model.users.weight @ model.items.weight.T - truth)[seen]
        return wrong.square().mean()

    def batch_loss(iteration: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed * 100_003 + iteration)
        some = seen & (torch.rand(users, items, generator=generator) < 0.25)
        return (model.users.weight @ model.items.weight.T - truth)[some].square().mean()

    return Training(model, optimizer, batch_loss, whole, {"*": 1})


def noise(seed: int) -> Training:
    """Return a quadratic that has long converged, and only follows its batches' noise: there is no path to continue."""
    torch.manual_seed(seed)
    model = nn.Linear(64, 64, bias=False)
    nn.init.zeros_(model.weight)

    def batch_loss(iteration: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed * 100_003 + iteration)
        return (model.weight - torch.randn(64, 64, generator=generator)).square().sum() / 2

    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    return Training(model, optimizer, batch_loss, lambda: model.weight.square().sum(), {"*": 1})


TRAININGS = {"MLR": mlr, "CNN": cnn, "factorisation": factors, "noise": noise}


@dataclass(frozen=True)
class Outcome:
    square: float
    rework: int
    report: Any


@cache
def undisturbed(build: Callable[[int], Training], seed: int) -> tuple[float, int]:
    """Return the lowest loss from `MEASURED_FROM` on, and the iteration that has it."""
    run = build(seed)
    losses = {}
    for iteration in range(1, ITERATIONS + 1):
        run.step(iteration)
        if iteration > MEASURED_FROM:
            losses[iteration] = run.loss()
    reached = min(losses, key=losses.__getitem__)
    return losses[reached], reached


def outcome(
    build: Callable[[int], Training], seed: int, save: tuple[float, int], extrapolate: bool, folder: Path
) -> Outcome:
    """Run once: lose `LOST` shards, recover, and continue until it is as good as the undisturbed run."""
    target, reached = undisturbed(build, seed)
    chance = np.random.default_rng(seed)
    fails_after = int(chance.integers(MEASURED_FROM // 2, MEASURED_FROM))
    lost = chance.choice(SHARDS, LOST, replace=False).tolist()
    fraction, interval = save
    run = build(seed)
    session = scarctl.attach(
        run.model,
        run.optimizer,
        store=folder / "store",
        partitioning=scarctl.Partitioning(
            shards=SHARDS, seed=seed, rows=run.rows, partition_bytes=None if run.rows else 512
        ),
        fraction=fraction,
        interval=1 << 30,  # by hand, and waited for: the same on every disk
        selection=scarctl.Selection(extrapolate=extrapolate),
        settings=scarctl.Settings(daemon=False, arena_dir=folder, flush_on_signal=False),
    )
    for iteration in range(1, PATIENCE * ITERATIONS):
        run.step(iteration)
        if iteration <= fails_after and iteration % interval == 0:
            session.checkpoint(wait=True)
        if iteration == fails_after:
            report = session.recover(lost)
        if iteration > MEASURED_FROM and run.loss() <= target:
            break
    session.close(seal=False)
    assert report.perturbation.value is not None
    return Outcome(report.perturbation.value**2, iteration - reached, report)


def gains(only: str | None, seeds: int, folder: Path) -> None:
    rows = []
    for name, build in TRAININGS.items():
        if only not in (None, name):
            continue
        for save, how in SAVES.items():
            pairs = []
            for seed in range(seeds):
                pair = []
                for extrapolate in (False, True):
                    with scratch(folder) as place:
                        pair.append(outcome(build, seed, how, extrapolate, place))
                pairs.append(pair)
            plain, moved = ([pair[k] for pair in pairs] for k in (0, 1))
            told = [one.report.extrapolation for one in moved]
            expected = statistics.mean(1 - (one.expected_gain or 0.0) for one in told)
            partitions = statistics.mean(one.partitions for one in told)
            restored = statistics.mean(one.report.restored_partitions for one in moved)
            rows.append(
                [
                    f"{name}, {save}",
                    f"{sum(m.square for m in moved) / sum(p.square for p in plain):.0%}",
                    f"{expected:.0%}",
                    mean([p.rework for p in plain]),
                    mean([m.rework for m in moved]),
                    mean([m.rework - p.rework for p, m in pairs]),
                    f"{partitions:.0f} of {restored:.0f}",
                    f"{statistics.mean(one.unknown for one in told):.0f}",
                ]
            )
    heads = [
        "training, saves",
        "kept",
        "reported",
        "rework",
        "extrapolated",
        "difference",
        "partitions",
        "unknown",
    ]
    print_table(heads, rows)


def mean(values: list[int]) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.1f} ± {error:.1f}"


def costs(mb: int, rounds: int, folder: Path) -> None:
    """Print the time of one checkpoint's copy of 1/8 of a state with Adam's slots, right before it is handed over."""
    width = 1024
    count = mb * 1_000_000 // (3 * 4 * width * width)
    rows = []
    with scratch(folder) as stores, arenas(folder) as arena:
        cases: dict[str, Callable[[], float]] = {}
        sessions = []
        for name, extrapolate in (("without", False), ("with", True)):
            model = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(max(1, count)))
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            session = scarctl.attach(
                model,
                optimizer,
                store=stores / name,
                selection=scarctl.Selection(extrapolate=extrapolate),
                interval=1 << 30,
                settings=scarctl.Settings(daemon=False, arena_dir=arena, flush_on_signal=False),
            )
            sessions.append(session)
            cases[name] = copying(session, model, optimizer)
        seconds = interleaved(cases, rounds)
        for name, session in zip(cases, sessions, strict=True):
            engine = session._started()
            file = engine.arena.folder / MOVEMENTS
            size = file.stat().st_size if file.exists() else 0
            share = f"{size / engine.layout.nbytes:.1%}"
            rows.append(
                [
                    name,
                    spread(seconds[name], 1e-3, 1),
                    f"{ratio(seconds[name], seconds['without']):.2f}",
                    share,
                ]
            )
            session.close(seal=False)
    print_table(["extrapolate", "ms", "ratio", "memory / state"], rows)


def copying(
    session: scarctl.Session, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[], float]:
    def train() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()

    def once() -> float:
        train()
        engine = session._started()
        live = session._binding.live(engine.arena)
        started = time.perf_counter()
        copied = engine.copy(live, session.head_step, Extent.PART)
        taken = time.perf_counter() - started
        engine.hand_over(copied, captured(session.adapter))
        assert engine.saver.drain(60)
        return taken

    train()
    session.checkpoint(full=True, wait=True)
    for _ in range(9):  # until every partition was copied again
        once()
    return once


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--only", choices=TRAININGS, help="only this training")
    made.add_argument("--seeds", type=int, default=10)
    made.add_argument(
        "--mb", type=int, default=128, help="megabytes of the state whose copy is timed; 0: none"
    )
    made.add_argument("--rounds", type=int, default=7)
    given = made.parse_args()
    torch.set_num_threads(1)
    if given.seeds:
        gains(given.only, given.seeds, given.folder)
    if given.mb:
        costs(given.mb, given.rounds, given.folder)


if __name__ == "__main__":
    main()
