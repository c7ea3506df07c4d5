"""One trial: a run that fails at one moment, and goes on from there once for every way to be prepared.

The run is done twice up to the failure. The first time nothing happens to it, and it says how many iterations it needs.
The second time running checkpoints are kept beside it, one for each way of saving, with a session's own layout,
distances, policies and copies; a copy in an arena is what the store would give back. At the failure the state is put
aside, so that every way starts from the same one and sees the same batches afterwards.

The rework cost of a way is how many iterations it needs in all, the repeated ones too, less those of the undisturbed
run: the iteration cost of Qiao et al., section 3.1, equation (4). It may be negative.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl import extras as extras_codec
from scarctl.adapter import Adapter, find_adapter
from scarctl.binding import layout_of, tensors_of
from scarctl.daemon.arena import Arena
from scarctl.distance import Norm
from scarctl.dtypes import plain, torched
from scarctl.errors import UsageError
from scarctl.layout import Layout
from scarctl.live import LiveState
from scarctl.motion import Motion
from scarctl.outlook import parameters_of, rework_of
from scarctl.policy import select, squared
from scarctl.prediction import Outlook
from scarctl.simulate.extrapolate import Extrapolator
from scarctl.simulate.study import Cell, Study
from scarctl.simulate.workload import Workload
from scarctl.store import Settings
from scarctl.version import pack, step_of

PATIENCE = 4
"""A run that needs so many times the iterations of the undisturbed one is given up."""
_SAME = 1e-6
"""Relative difference of the metric up to which two runs of one seed count as the same."""

Ids = NDArray[np.int64]


def run_trial(study: Study, workload: Workload, trial: int) -> dict[str, Any]:
    """The trial's results as JSON values. `trial`: its number, which with the study's seed decides all chance.

    Raises UsageError when the workload does not converge, or is not what it should be.
    """
    words = np.random.SeedSequence([study.seed, trial]).generate_state(4, np.uint64).tolist()
    seed, shard_seed = words[0] >> 32, words[1] >> 2
    undisturbed = _undisturbed(study, workload, seed)
    failed_after = study.fail_after or _failure(study.failure_rate, undisturbed.iterations, words[2] / 2**64)
    if failed_after >= undisturbed.iterations:
        raise UsageError(
            f"the run is done after {undisturbed.iterations} iterations: it cannot fail after {failed_after}"
        )
    run = _Run(study, workload, seed)
    reached = run.train(failed_after)
    same = math.isclose(reached, undisturbed.metrics[failed_after - 1], rel_tol=_SAME, abs_tol=1e-300)
    cells = study.cells()
    results = [run.fail(cell, shard_seed, undisturbed) for cell in cells]
    return {
        "trial": trial,
        "failed_after": failed_after,
        "undisturbed": undisturbed.iterations,
        "target": undisturbed.target,
        "same": same,
        "rework": [rework for rework, _, _ in results],
        "perturbation": [perturbation for _, perturbation, _ in results],
        "arrived": [arrived for _, _, arrived in results],
        "predicted": [run.predict(cell, shard_seed) for cell in cells],
        "rollback_steps": run.rollback_steps,
    }


@dataclass(frozen=True, slots=True)
class _Undisturbed:
    iterations: int
    """Until the target was reached."""
    target: float
    metrics: list[float]
    """After every iteration."""


def _undisturbed(study: Study, workload: Workload, seed: int) -> _Undisturbed:
    target = study.target if study.target is not None else getattr(workload, "target", None)
    most = study.iterations or workload.iterations
    workload.reset(seed)
    metrics: list[float] = []
    for iteration in range(1, most + 1):
        workload.step(iteration)
        metrics.append(float(workload.metric()))
        if not math.isfinite(metrics[-1]):
            raise UsageError(f"the metric is {metrics[-1]} after iteration {iteration} of an undisturbed run")
        if target is not None and metrics[-1] <= target:
            break
    goal = metrics[-1] if target is None else float(target)
    reached = next((k for k, metric in enumerate(metrics, 1) if metric <= goal), None)
    if reached is None:
        raise UsageError(
            f"an undisturbed run does not reach {goal:.6g} in {most} iterations: its best is {min(metrics):.6g}",
            hint="give a higher --target, or more --iterations",
        )
    if reached < 2:
        raise UsageError(
            f"an undisturbed run is at {goal:.6g} after its first iteration: nothing can fail before",
            hint="give a lower --target, or more --iterations",
        )
    return _Undisturbed(reached, goal, metrics)


def _failure(rate: float | None, iterations: int, chance: float) -> int:
    """Iterations before the failure, 1..iterations-1: `chance` from 0 to 1 of a uniform or geometric distribution."""
    if rate is None:
        return 1 + int(chance * (iterations - 1))
    # What is left of the geometric distribution before the run has converged.
    within = -math.expm1((iterations - 1) * math.log1p(-rate))
    return min(iterations - 1, 1 + int(math.log1p(-chance * within) / math.log1p(-rate)))


class _Keeper:
    """A running checkpoint: one way of saving."""

    guess: Extrapolator | None = None
    """What extrapolating recovery needs, where that is asked for."""

    def __init__(self, layout: Layout, policy: str, fraction: Fraction, interval: int, seed: int) -> None:
        self.every = int(interval * fraction)
        self.arena = Arena.anonymous(layout)
        self.extras: tuple[str, Any] | None = None
        self._policy = policy
        self._budget = max(1, int(fraction * layout.nbytes))
        self._seed = seed
        self._credit = self._cursor = 0
        self._live: LiveState | None = None

    @property
    def step(self) -> int:
        """The iteration of its newest copies."""
        return int(step_of(self.arena.version).max())

    def live(self, adapter: Adapter) -> LiveState:
        """The state as it is now, beside this checkpoint."""
        layout = self.arena.layout
        tensors = tensors_of(adapter, layout)
        if self._live is None:
            self._live = LiveState(layout, tensors, self.arena)
        return self._live.with_tensors(dict(enumerate(tensors)))

    def save_all(self, adapter: Adapter, iteration: int) -> None:
        """A full checkpoint, with extras: what a rollback goes back to."""
        self._copy(self.live(adapter), np.arange(self.arena.layout.partitions), iteration)
        self.extras = _capture(adapter)

    def save(self, adapter: Adapter, iteration: int, norm: Norm) -> None:
        """A checkpoint as `scarctl.engine` makes it."""
        if self._policy == "full":
            self.save_all(adapter, iteration)
            return
        live, layout = self.live(adapter), self.arena.layout
        chosen = select(
            self._policy,
            distance_sq=squared(live.distances(norm)),
            nbytes=layout.partition_bytes,
            staleness=np.maximum(iteration - step_of(self.arena.version), 0),
            eligible=np.ones(layout.partitions, dtype=bool),
            budget=self._budget,
            credit=self._credit,
            cursor=self._cursor,
            seed=self._seed,
            step=iteration,
        )
        self._credit, self._cursor = chosen.credit, chosen.cursor
        self._copy(live, chosen.ids, iteration)

    def _copy(self, live: LiveState, ids: Ids, iteration: int) -> None:
        if self.guess is not None:
            self.guess.before_save(live, ids, iteration)
        live.save(ids, pack(self.arena.epoch, iteration))


class _Run:
    """A run with running checkpoints beside it, up to its failure and again and again from there."""

    def __init__(self, study: Study, workload: Workload, seed: int) -> None:
        self._study = study
        self._workload = workload
        self._norm: Norm = study.norm or getattr(workload, "norm", None) or "l2"
        self._seed = seed
        workload.reset(seed)
        self._adapter = _adapter(workload)
        self._keepers: dict[tuple[str, Fraction], _Keeper] = {}
        self._motions: dict[int, Motion] = {}
        """By the iterations between two looks."""
        self._aside: _Keeper | None = None
        self._failed_after = 0

    def train(self, iterations: int) -> float:
        """Train up to the failure, and put the state aside; returns the metric there."""
        ways = {(cell.policy, cell.fraction) for cell in self._study.cells()}
        for iteration in range(1, iterations + 1):
            self._workload.step(iteration)
            if iteration == 1:
                # After the first step, as in a session: an optimizer has no moments before.
                layout = layout_of(self._adapter, _cut(self._workload))
                for policy, fraction in sorted(ways):
                    keeper = _Keeper(layout, policy, fraction, self._study.interval, self._seed)
                    keeper.save_all(self._adapter, 1)
                    if "extrapolate" in self._study.modes:
                        keeper.guess = Extrapolator(keeper.arena)
                    self._keepers[policy, fraction] = keeper
                    self._motions[keeper.every] = Motion(layout)
            else:
                for keeper in self._keepers.values():
                    if iteration % keeper.every == 0:
                        keeper.save(self._adapter, iteration, self._norm)
                for every, motion in self._motions.items():
                    if iteration % every == 0:
                        motion.look(tensors_of(self._adapter, layout), iteration)
        self._failed_after = iterations
        self._aside = _Keeper(layout, "full", Fraction(1), 1, self._seed)
        self._aside.save_all(self._adapter, iterations)
        return float(self._workload.metric())

    def fail(self, cell: Cell, shard_seed: int, undisturbed: _Undisturbed) -> tuple[int, float, bool]:
        """Lose, recover and go on: rework cost, norm of the perturbation, and whether the target was reached at all."""
        assert self._aside is not None, "it has not trained yet"
        _restore(self._aside, self._adapter)
        keeper = self._keepers[cell.policy, cell.fraction]
        live = keeper.live(self._adapter)
        if cell.lost is None:
            _restore(keeper, self._adapter)
            iteration = keeper.step
        else:
            lost = _lost(keeper.arena.layout, cell.lost, shard_seed)
            live.load(lost)
            if cell.mode == "extrapolate":
                assert keeper.guess is not None, "it was asked for"
                keeper.guess.restore(live, lost, self._failed_after)
            iteration = self._failed_after
        if recompute := getattr(self._workload, "recompute", None):
            recompute()
        moved = self._aside.live(self._adapter).distances()
        done, most = self._failed_after, PATIENCE * undisturbed.iterations
        arrived = False
        while done < most and not arrived:
            iteration, done = iteration + 1, done + 1
            self._workload.step(iteration)
            arrived = float(self._workload.metric()) <= undisturbed.target
        return done - undisturbed.iterations, float(np.linalg.norm(moved)), arrived

    @property
    def rollback_steps(self) -> int | None:
        """Iterations since the newest full checkpoint; None where there is none beside the run."""
        steps = [k.step for (policy, _), k in self._keepers.items() if policy == "full"]
        return self._failed_after - max(steps) if steps else None

    def predict(self, cell: Cell, shard_seed: int) -> dict[str, Any] | None:
        """What a session would say at the failure of the rework that `cell` costs: from the distances of what is lost,
        and from the ages of its copies alone. None for what is not predicted.
        """
        if cell.mode != "partial" or cell.lost is None:
            return None
        assert self._aside is not None, "it has not trained yet"
        _restore(self._aside, self._adapter)
        keeper, step = self._keepers[cell.policy, cell.fraction], self._failed_after
        layout = keeper.arena.layout
        outlook = Outlook(step, self._motions[keeper.every].history.convergence(step))
        lost, parameters = _lost(layout, cell.lost, shard_seed), parameters_of(layout)
        lost = lost[parameters[lost]]
        share = lost.size / max(1, int(np.count_nonzero(parameters)))
        ages = np.maximum(step - step_of(keeper.arena.version[lost]), 0)
        distance = keeper.live(self._adapter).distances()[lost]
        return {
            name: rework_of(outlook, share, ages=ages, distance=known).to_json()
            for name, known in (("distances", distance), ("ages", None))
        }


def _lost(layout: Layout, share: Fraction, seed: int) -> Ids:
    """The partitions of `share` of the state, by the rule that splits a state into shards."""
    return np.flatnonzero(layout.shards(share.denominator, seed) < share.numerator)


def _adapter(workload: Workload) -> Adapter:
    state = workload.state()
    model, optimizer = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    optimizers = [] if optimizer is None else list(optimizer) if isinstance(optimizer, list) else [optimizer]
    return find_adapter(model, optimizers, extras=getattr(workload, "extras", None))


def _cut(workload: Workload) -> Settings:
    """How the workload wants its state cut."""
    rows = getattr(workload, "rows", None) or {}
    return Settings(
        partition_bytes=getattr(workload, "partition_bytes", None),
        by_layer=bool(getattr(workload, "by_layer", False)),
        rows=tuple(rows.items()),
    )


def _capture(adapter: Adapter) -> tuple[str, Any]:
    """Extras as a commit would hold them: whatever becomes of the live objects, this stays."""
    return extras_codec.encode(
        {"early": plain(adapter.capture_early()), "late": plain(adapter.capture_late())}
    )


def _restore(keeper: _Keeper, adapter: Adapter) -> None:
    """The whole state as it was at a full checkpoint, extras included."""
    assert keeper.extras is not None, "only a full checkpoint is gone back to"
    keeper.live(adapter).load(np.arange(keeper.arena.layout.partitions))
    extras: Any = torched(extras_codec.decode(*keeper.extras))
    adapter.restore(extras["early"], extras["late"])
