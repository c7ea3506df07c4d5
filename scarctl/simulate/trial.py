"""Run one trial: fail a run at one moment, and recover and finish it once for every cell of the study.

The run is trained twice. The first, undisturbed, gives the iterations to reach the target. The second keeps one running
checkpoint for each way of saving, with a session's layout, distances, policies and copies. An arena
stands for the store. At the failure the state is set aside, so that every cell starts from the same state and sees the
same batches afterwards.

The rework cost of a cell is all its iterations, repeated ones included, less those of the undisturbed run: the
iteration cost of Qiao et al., section 3.1, equation (4). It may be negative.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from scarctl.adapter import Adapter, find_adapter
from scarctl.arena.arena import Arena
from scarctl.checkpoint.binding import layout_of, tensors_of
from scarctl.checkpoint.distance import Norm
from scarctl.checkpoint.live_state import LiveState
from scarctl.checkpoint.motion import Motion
from scarctl.checkpoint.step_end import captured
from scarctl.errors import UsageError
from scarctl.policy.select import Candidates, select, squared
from scarctl.recovery.forecast import rework_of
from scarctl.simulate.study import Cell, Study
from scarctl.simulate.workload import Workload
from scarctl.state import codec
from scarctl.state.extras import Extras
from scarctl.state.layout import Layout
from scarctl.state.layouts import parameters_of
from scarctl.state.torch_dtypes import to_raw, torched
from scarctl.state.version import pack, step_of
from scarctl.store.settings import Settings
from scarctl.theory.rework import Outlook
from scarctl.util.arrays import Ids

PATIENCE = 4
"""Multiple of the undisturbed run's iterations after which a run is given up."""
_SAME = 1e-6
"""Largest relative difference of the metric between two equal runs of one seed."""


@dataclass(frozen=True, slots=True)
class Known:
    """Runs that need not be repeated, because equal seeds and states train equally.

    Pass it to all trials of a training. Its workloads may save and recover differently, but must train alike.
    """

    undisturbed: dict[tuple[Any, ...], _Undisturbed] = field(default_factory=dict)
    """By seed, and the settings on which its end depends."""
    finished: dict[tuple[Any, ...], tuple[int, bool]] = field(default_factory=dict)
    """Results of runs that continued after a recovery: by the undisturbed run, the failure, and the recovered state."""


def run_trial(study: Study, workload: Workload, trial: int, known: Known | None = None) -> dict[str, Any]:
    """Run a trial and return its results as JSON values.

    trial: its number, which with the study's seed determines all random choices.
    known: results of earlier trials, to which those of this trial are added.
    Raises UsageError when the workload does not converge, or a run of it is unusable.
    """
    words = np.random.SeedSequence([study.seed, trial]).generate_state(4, np.uint64).tolist()
    seed, shard_seed = words[0] >> 32, words[1] >> 2
    known = known or Known()
    of = (seed, study.target, study.iterations, study.smooth)
    if of not in known.undisturbed:
        known.undisturbed[of] = _undisturbed(study, workload, seed)
    undisturbed = known.undisturbed[of]
    chance = _stratified(study, trial, words[2] / 2**64) if study.stratify else words[2] / 2**64
    failed_after = study.fail_after or _failure(study, undisturbed.iterations, chance)
    if failed_after >= undisturbed.iterations:
        raise UsageError(
            f"the run ends after {undisturbed.iterations} iterations: it cannot fail after {failed_after}"
        )
    run = _Run(study, workload, seed)
    reached = run.train(failed_after)
    same = math.isclose(reached, undisturbed.metrics[failed_after - 1], rel_tol=_SAME, abs_tol=1e-300)
    cells = study.cells()
    results = [run.fail(cell, shard_seed, undisturbed, known, of) for cell in cells]
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
        "oldest": [run.oldest(cell) for cell in cells],
        "written": [run.written(cell) for cell in cells],
        "rollback_steps": run.rollback_steps,
    }


@dataclass(frozen=True, slots=True)
class _Undisturbed:
    iterations: int
    """Iterations until the target was reached."""
    target: float
    metrics: list[float]
    """The metric after every iteration."""


def _undisturbed(study: Study, workload: Workload, seed: int) -> _Undisturbed:
    target = study.target if study.target is not None else getattr(workload, "target", None)
    most = study.iterations or workload.iterations
    workload.reset(seed)
    metrics: list[float] = []
    smoothed: list[float] = []
    for iteration in range(1, most + 1):
        workload.step(iteration)
        metrics.append(float(workload.metric()))
        if not math.isfinite(metrics[-1]):
            raise UsageError(f"the metric is {metrics[-1]} after iteration {iteration} of an undisturbed run")
        smoothed.append(_smooth(metrics, study.smooth))
        if target is not None and smoothed[-1] <= target:
            break
    goal = smoothed[-1] if target is None else float(target)
    reached = next((k for k, metric in enumerate(smoothed, 1) if metric <= goal), None)
    if reached is None:
        raise UsageError(
            f"an undisturbed run does not reach {goal:.6g} in {most} iterations: its best is {min(smoothed):.6g}",
            hint="give a higher --target, or more --iterations",
        )
    if reached < 2:
        raise UsageError(
            f"an undisturbed run is at {goal:.6g} after its first iteration: nothing can fail before",
            hint="give a lower --target, or more --iterations",
        )
    return _Undisturbed(reached, goal, metrics)


def _smooth(metrics: Sequence[float], width: int) -> float:
    """Return the mean of the last `width` metrics, of all if they are fewer. A single low one does not decide it."""
    return sum(metrics[-width:]) / min(width, len(metrics))


def _failure(study: Study, iterations: int, chance: float) -> int:
    """Return the iterations before the failure, 1..iterations-1, drawn by `chance` uniformly or geometrically.

    The geometric distribution is truncated where the run has converged. With `stratify`, `chance` is a quantile of
    all moments in the order of their distance from a full checkpoint.
    """
    moments = np.arange(1, iterations)
    rate = study.failure_rate or 0.0
    if study.stratify:
        moments = moments[np.argsort(moments % study.interval, kind="stable")]
    reached = np.cumsum(np.exp((moments - 1) * math.log1p(-rate)))
    found = np.searchsorted(reached, chance * reached[-1], side="right")
    return int(moments[min(found, moments.size - 1)])


def _stratified(study: Study, trial: int, chance: float) -> float:
    """Return a chance from the trial's stratum: of each `interval` trials in a row, each has another one."""
    block, place = divmod(trial, study.interval)
    strata = np.random.default_rng([study.seed, block]).permutation(study.interval)
    return (int(strata[place]) + chance) / study.interval


class _Keeper:
    """A running checkpoint of one way of saving."""

    def __init__(self, layout: Layout, policy: str, fraction: Fraction, interval: int, seed: int) -> None:
        self.every = int(interval * fraction)
        self.arena = Arena.anonymous(layout)
        self.extras: tuple[str, Any] | None = None
        self._policy = policy
        self._budget = max(1, int(fraction * layout.nbytes))
        self._seed = seed
        self._credit = self._cursor = self._saves = self._written = 0
        self._live: LiveState | None = None

    @property
    def step(self) -> int:
        """Iteration of the newest copies."""
        return int(step_of(self.arena.version).max())

    @property
    def written(self) -> float | None:
        """Bytes saved after the first iteration, relative to the budget; None before a second checkpoint."""
        return self._written / (self._saves * self._budget) if self._saves else None

    def live(self, adapter: Adapter) -> LiveState:
        """Return the live state next to this checkpoint's copies."""
        layout = self.arena.layout
        tensors = tensors_of(adapter, layout)
        if self._live is None:
            self._live = LiveState(layout, tensors, self.arena)
        return self._live.with_tensors(dict(enumerate(tensors)))

    def save_all(self, adapter: Adapter, iteration: int) -> None:
        """Save everything with extras, for a rollback."""
        self._copy(self.live(adapter), np.arange(self.arena.layout.partitions), iteration)
        self.extras = _capture(adapter)

    def save(self, adapter: Adapter, iteration: int, norm: Norm) -> None:
        """Save a checkpoint as `scarctl.checkpoint.engine` does."""
        self._saves += 1
        if self._policy == "full":
            self._written += self.arena.layout.nbytes
            self.save_all(adapter, iteration)
            return
        live, layout = self.live(adapter), self.arena.layout
        distance = live.distances(norm)
        among = Candidates(
            distance_sq=squared(distance),
            nbytes=layout.partition_bytes,
            staleness=np.maximum(iteration - step_of(self.arena.version), 0),
            eligible=np.ones(layout.partitions, dtype=bool),
            seed=self._seed,
            step=iteration,
        )
        chosen = select(self._policy, among, self._budget, credit=self._credit, cursor=self._cursor)
        self._credit, self._cursor = chosen.credit, chosen.cursor
        self._written += chosen.nbytes
        self.arena.note_distances(distance)
        self._copy(live, chosen.ids, iteration)

    def load(self, adapter: Adapter, ids: Ids) -> None:
        """Restore the partitions `ids`."""
        self.live(adapter).load(ids)

    def _copy(self, live: LiveState, ids: Ids, iteration: int) -> None:
        live.save(ids, self.arena.slot, pack(self.arena.epoch, iteration), iteration + 1)
        self.arena.note_distances(0.0, ids)


class _Run:
    """A run with its running checkpoints: trained to the failure once, and from there once per cell."""

    def __init__(self, study: Study, workload: Workload, seed: int) -> None:
        self._study = study
        self._workload = workload
        self._norm: Norm = study.norm or getattr(workload, "norm", None) or "l2"
        self._seed = seed
        workload.reset(seed)
        self._adapter = _adapter(workload)
        self._keepers: dict[tuple[str, Fraction], _Keeper] = {}
        self._motions: dict[int, Motion] = {}
        """By the interval between two looks, in iterations."""
        self._aside: _Keeper | None = None
        self._failed_after = 0

    def train(self, iterations: int) -> float:
        """Train up to the failure, and set the state aside. Return the metric there."""
        ways = {(cell.policy, cell.fraction) for cell in self._study.cells()}
        for iteration in range(1, iterations + 1):
            self._workload.step(iteration)
            if iteration == 1:
                # After the first step, as in a session: before it, an optimizer has no moments.
                layout = layout_of(self._adapter, _cut(self._workload))
                for policy, fraction in sorted(ways):
                    keeper = _Keeper(layout, policy, fraction, self._study.interval, self._seed)
                    keeper.save_all(self._adapter, 1)
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

    def fail(
        self, cell: Cell, shard_seed: int, undisturbed: _Undisturbed, known: Known, of: tuple[Any, ...]
    ) -> tuple[int, float, bool]:
        """Fail, recover and continue. Return rework, the perturbation's l2 norm, and whether the target was reached.

        of: the key of the undisturbed run in `known`.
        """
        assert self._aside is not None, "it has not trained yet"
        _restore(self._aside, self._adapter)
        keeper = self._keepers[cell.policy, cell.fraction]
        if cell.lost is None:
            _restore(keeper, self._adapter)
            iteration = keeper.step
        else:
            iteration = self._failed_after
            lost = _lost(keeper.arena.layout, cell.lost, shard_seed)
            keeper.load(self._adapter, lost)
        if recompute := getattr(self._workload, "recompute", None):
            recompute()
        moved = self._aside.live(self._adapter).distances()
        key = (*of, self._failed_after, iteration, _digest(self._adapter, self._aside.arena.layout))
        if key not in known.finished:
            known.finished[key] = self._finish(iteration, undisturbed)
        rework, arrived = known.finished[key]
        return rework, float(np.linalg.norm(moved)), arrived

    def _finish(self, iteration: int, undisturbed: _Undisturbed) -> tuple[int, bool]:
        """Continue after `iteration`. Return rework, and whether the target was reached."""
        done, most = self._failed_after, PATIENCE * undisturbed.iterations
        metrics, arrived = undisturbed.metrics[:iteration], False
        while done < most and not arrived:
            iteration, done = iteration + 1, done + 1
            self._workload.step(iteration)
            metrics.append(float(self._workload.metric()))
            arrived = _smooth(metrics, self._study.smooth) <= undisturbed.target
        return done - undisturbed.iterations, arrived

    def written(self, cell: Cell) -> float | None:
        """Return the bytes saved until the failure, relative to the budget; None: no checkpoint but the first."""
        return self._keepers[cell.policy, cell.fraction].written

    @property
    def rollback_steps(self) -> int | None:
        """Iterations since the newest full checkpoint; None if the study saves none."""
        steps = [k.step for (policy, _), k in self._keepers.items() if policy == "full"]
        return self._failed_after - max(steps) if steps else None

    def oldest(self, cell: Cell) -> dict[str, int] | None:
        """Return the age of every parameter's oldest copy that differs from its live values at the failure.

        In iterations, by name; 0 if no copy differs. None for a rollback.
        """
        if cell.lost is None:
            return None
        assert self._aside is not None, "it has not trained yet"
        _restore(self._aside, self._adapter)
        keeper = self._keepers[cell.policy, cell.fraction]
        layout = keeper.arena.layout
        ages = np.maximum(self._failed_after - step_of(keeper.arena.version), 0)
        ages[keeper.live(self._adapter).distances() == 0] = 0
        parts = zip(layout.groups, layout.base[:-1], layout.base[1:], strict=True)
        return {group.name: int(ages[first:stop].max(initial=0)) for group, first, stop in parts}

    def predict(self, cell: Cell, shard_seed: int) -> dict[str, Any] | None:
        """Predict the rework of `cell` as a session would at the failure. None for a rollback.

        The result has a prediction from the lost partitions' distances, and one from the ages of their copies alone.
        """
        if cell.lost is None:
            return None
        assert self._aside is not None, "it has not trained yet"
        _restore(self._aside, self._adapter)
        keeper, step = self._keepers[cell.policy, cell.fraction], self._failed_after
        layout = keeper.arena.layout
        outlook = Outlook.after(step, self._motions[keeper.every].history)
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
    """Return the partitions of a `share` of the state, by the rule that splits a state into shards."""
    return np.flatnonzero(layout.shards(share.denominator, seed) < share.numerator)


def _adapter(workload: Workload) -> Adapter:
    state = workload.state()
    model, optimizer = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    optimizers = [] if optimizer is None else list(optimizer) if isinstance(optimizer, list) else [optimizer]
    return find_adapter(model, optimizers, extras=getattr(workload, "extras", None))


def _cut(workload: Workload) -> Settings:
    """Return the workload's partitioning."""
    rows = getattr(workload, "rows", None) or {}
    return Settings(
        partition_bytes=getattr(workload, "partition_bytes", None),
        by_layer=bool(getattr(workload, "by_layer", False)),
        rows=tuple(rows.items()),
    )


def _capture(adapter: Adapter) -> tuple[str, Any]:
    """Return extras as a commit stores them, independent of the live objects."""
    return codec.encode(captured(adapter).to_tree())


def _digest(adapter: Adapter, layout: Layout) -> bytes:
    """Return a digest of the live state, extras included."""
    found = hashlib.blake2b(digest_size=16)
    text, extras = _capture(adapter)
    tensors = [to_raw(tensor) for group in tensors_of(adapter, layout) for tensor in group]
    for data in (text.encode(), *(raw.data for raw in (*extras.values(), *tensors))):
        found.update(data)
    return found.digest()


def _restore(keeper: _Keeper, adapter: Adapter) -> None:
    """Restore the whole state of a full checkpoint, extras included."""
    assert keeper.extras is not None, "only full checkpoints have extras"
    keeper.live(adapter).load(np.arange(keeper.arena.layout.partitions))
    extras = Extras.from_tree(torched(codec.decode(*keeper.extras)))
    adapter.restore(extras.state)
