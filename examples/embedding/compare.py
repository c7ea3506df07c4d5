"""Lose half of the rows of an embedding model while it trains, and compare the cost of each way of saving them.

python -m examples.embedding.compare
python -m examples.embedding.compare --seeds 8 --optimizer adam --batch 1024

One run is saved in several ways, each by a session with a store of its own. At some moments half of the rows become
NaN, parameters and the optimizer's values, and each session in turn restores them. Their values are known here, so the
squared perturbation is measured; then they are put back for the next session. From the last moment the run continues
once for every way, with the rows that it has restored. Rework is the number of additional iterations until the loss is
as low as undisturbed.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import scarctl
from examples.embedding.model import BATCH, OPTIMIZERS, Batches, build, evaluate, train_step
from examples.embedding.words import WORDS, Words, load
from scarctl.simulate.intervals import mean_of

SHARDS = 8
LOST = SHARDS // 2
FRACTION = 1 / 8
FULL_EVERY = 80
"""Iterations between two full checkpoints of which each writes everything, as is usual: what bytes are measured by."""
PART_EVERY = 10
"""Iterations between two of an eighth of the rows: as many bytes."""
CHANGED_EVERY = 40
"""A session leaves out rows that have not changed, so it can save all others this often for fewer bytes."""
LOSSES = 8
"""Losses of each run: PART_EVERY iterations apart, so that no age of a full checkpoint is preferred."""
ITERATIONS = 4 * FULL_EVERY
"""The undisturbed run's. The loss to reach is its lowest in the last fourth."""
BY_HAND = 1 << 30
"""An interval that never ends: checkpoints are called for, so that the numbers are the same on every disk."""


@dataclass(slots=True)
class Way:
    """To save, and what failures cost then."""

    name: str
    every: int
    """Iterations between two checkpoints."""
    policy: str | None = None
    """None: all that has changed."""
    squares: list[float] = field(default_factory=list)
    """Squared perturbations."""
    partial: list[int] = field(default_factory=list)
    """Rework, one for each seed."""
    rollback: list[int] = field(default_factory=list)
    """The same when everything goes back. Empty where nothing is sealed."""
    saved: list[float] = field(default_factory=list)
    """Bytes per FULL_EVERY iterations, one for each seed."""


@dataclass(frozen=True, slots=True)
class State:
    """All that training changes, after so many iterations."""

    iteration: int
    model: dict[str, torch.Tensor]
    optimizer: dict[str, Any]


class Run:
    """A run, and the sessions that save it."""

    def __init__(self, words: Words, optimizer: str, batch: int, seed: int) -> None:
        self._model, self._optimizer = build(words, seed, optimizer)
        self._batches = Batches(words, seed, batch)
        self._seed = seed

    def attach(self, way: Way, store: Path) -> scarctl.Session:
        """Return a session that saves in this way."""
        return scarctl.attach(
            self._model,
            self._optimizer,
            store=store,
            fraction=FRACTION,
            interval=BY_HAND,
            partitioning=scarctl.Partitioning(shards=SHARDS, seed=self._seed, rows={"*": 1}),
            selection=scarctl.Selection(policy=way.policy or "priority"),
        )

    def step(self, iteration: int) -> None:
        """Make one iteration; its number decides the batch."""
        train_step(self._model, self._optimizer, self._batches[iteration])

    def loss(self) -> float:
        """Return the loss of pairs that are always the same."""
        return evaluate(self._model, self._batches)

    def state(self, iteration: int) -> State:
        """Return a copy of its present state, of the end of `iteration`."""
        return State(
            iteration, copy.deepcopy(self._model.state_dict()), copy.deepcopy(self._optimizer.state_dict())
        )

    def load(self, state: State) -> None:
        """Make it what it was."""
        self._model.load_state_dict(state.model)
        self._optimizer.load_state_dict(copy.deepcopy(state.optimizer))  # it takes the tensors themselves

    @torch.no_grad()
    def spoil(self, session: scarctl.Session, shards: list[int]) -> None:
        """Overwrite all rows of these shards with NaN, the optimizer's too: they are gone."""
        layout, settings = session.store.current_layout(), session.store.settings
        assert layout is not None
        ids = np.flatnonzero(np.isin(layout.shards(settings.shards, settings.seed), shards))
        groups, (rows, _) = layout.group_of(ids), layout.row_ranges(ids)
        parameters = dict(self._model.named_parameters())
        for g, group in enumerate(layout.groups):
            parameter = parameters[group.name]
            for tensor in (parameter, *self._optimizer.state[parameter].values()):
                if tensor.shape == parameter.shape:
                    tensor[torch.from_numpy(rows[groups == g])] = float("nan")


def fail(run: Run, ways: list[Way], folder: Path, chance: np.random.Generator) -> dict[str, State]:
    """Train, and lose rows at LOSSES moments.

    Returns the state at the last one, "undisturbed", and what each way has made of it: by its name when what was
    lost is restored, by its name and "rollback" when everything goes back.
    """
    last = 2 * FULL_EVERY + int(chance.integers(1, FULL_EVERY + 1))
    moments = range(last - PART_EVERY * (LOSSES - 1), last + 1, PART_EVERY)
    states = {}
    with ExitStack() as stack:
        sessions = {way.name: run.attach(way, folder / way.name) for way in ways}
        for session in sessions.values():
            stack.callback(session.close, seal=False)
        for iteration in range(1, last + 1):
            run.step(iteration)
            for way in ways:
                if iteration == 1 or iteration % way.every == 0:
                    full = iteration == 1 or way.policy is None
                    sessions[way.name].checkpoint(full=full, wait=True)
                if iteration == FULL_EVERY:
                    way.saved.append(-sessions[way.name].stats.saved_bytes)
                elif iteration == 2 * FULL_EVERY:
                    way.saved[-1] += sessions[way.name].stats.saved_bytes
            if iteration not in moments:
                continue
            states["undisturbed"] = before = run.state(iteration)
            shards = sorted(chance.choice(SHARDS, LOST, replace=False).tolist())
            for way in ways:
                run.spoil(sessions[way.name], shards)
                sessions[way.name].recover(lost=shards)
                states[way.name] = after = run.state(iteration)
                way.squares.append(squared_difference(before, after))
                run.load(before)
        for way in ways:
            if way.policy is None:
                run.spoil(sessions[way.name], shards)
                sessions[way.name].recover("all", mode="rollback")
                states[f"{way.name} rollback"] = run.state(sessions[way.name].head_step)
    return states


def squared_difference(a: State, b: State) -> float:
    """Return the squared perturbation of the parameters."""
    return sum(float((a.model[name] - b.model[name]).square().sum()) for name in a.model)


def go_on(run: Run, state: State, target: float | None = None) -> tuple[int, float]:
    """Train on from a state. Returns iterations from there to a loss of `target` at most, and that loss.

    Without a target: to the lowest loss of the last FULL_EVERY of ITERATIONS.
    """
    run.load(state)
    losses = {}
    for iteration in range(state.iteration + 1, ITERATIONS + 1 if target is None else 4 * ITERATIONS):
        run.step(iteration)
        if iteration <= ITERATIONS - FULL_EVERY:
            continue
        losses[iteration - state.iteration] = loss = run.loss()
        if target is not None and loss <= target:
            return iteration - state.iteration, loss
    if target is not None:
        raise SystemExit(f"a loss of {target:.4f} was not reached in {4 * ITERATIONS} iterations")
    best = min(losses, key=losses.__getitem__)
    return best, losses[best]


def compare(words: Words, optimizer: str, batch: int, seeds: int, folder: Path) -> list[Way]:
    """Fail a run of each seed, and print what each failure costs."""
    ways = [
        Way("full", FULL_EVERY),
        Way("changed", CHANGED_EVERY),
        *(Way(policy, PART_EVERY, policy) for policy in ("random", "round", "priority")),
    ]
    for seed in range(seeds):
        run = Run(words, optimizer, batch, seed)
        states = fail(run, ways, folder / str(seed), np.random.default_rng(seed))
        undisturbed, target = go_on(run, states["undisturbed"])
        for way in ways:
            for name, costs in ((way.name, way.partial), (f"{way.name} rollback", way.rollback)):
                if name in states:
                    costs.append(go_on(run, states[name], target)[0] - undisturbed)
        failed_after = states["undisturbed"].iteration
        found = ", ".join(f"{way.name} {way.partial[-1]:+d}" for way in ways)
        back = ", ".join(f"{way.name} {way.rollback[-1]:+d}" for way in ways if way.rollback)
        print(f"seed {seed}, lost after iteration {failed_after}: {found}; rollback: {back}", flush=True)
    return ways


def table(ways: list[Way]) -> list[str]:
    """Means of all ways."""
    beside = float(np.mean(ways[0].squares))
    lines = ["saved     every  bytes    squared perturbation  rework                rollback"]
    for way in ways:
        square = float(np.mean(way.squares))
        cells = (
            f"{way.name:<8}  {way.every:<5}  {f'{np.mean(way.saved) / 1e6:.1f} MB':<7}",
            f"{f'{square:.4g} ({square / beside:.2f}x)':<20}",
            f"{_mean(way.partial):<20}",
            _mean(way.rollback) if way.rollback else "-",
        )
        lines.append("  ".join(cells))
    return lines


def _mean(costs: list[int]) -> str:
    """Mean, and its interval from five runs on."""
    mean = mean_of(np.array(costs, dtype=np.float64))
    spread = "" if mean.low is None else f" ({mean.low:.1f} to {mean.high:.1f})"
    return f"{mean.mean:.1f}{spread}"


def main() -> None:
    """Compare, and say what came of it."""
    arguments = _parse()
    started = time.perf_counter()
    words = load(arguments.words)
    print(f"{words}. Skip-gram, {arguments.optimizer}; one row is one partition.")
    print(
        f"{LOST} of {SHARDS} shards are lost. Rework: iterations more than undisturbed until the loss is as low.\n"
    )
    with tempfile.TemporaryDirectory(prefix="scarctl-embedding-") as folder:
        ways = compare(words, arguments.optimizer, arguments.batch, arguments.seeds, Path(folder))
    print(f"\nMeans over runs, in each {LOSSES} losses; bytes of {FULL_EVERY} iterations:\n")
    print("\n".join(table(ways)))
    print(f"It took {time.perf_counter() - started:.0f} s.")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="repetitions")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adagrad")
    parser.add_argument(
        "--batch",
        type=int,
        default=BATCH,
        help="pairs: the more, the more rows change between two checkpoints",
    )
    parser.add_argument("--words", type=int, default=WORDS, help="the most frequent ones")
    arguments = parser.parse_args()
    for name in ("seeds", "batch", "words"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} is {getattr(arguments, name)}: give 1 or more")
    return arguments


if __name__ == "__main__":
    main()
