"""Predict the cost of failures for each way of checkpointing: T = T_solve + T_dump + T_rework + T_restart.

The model is that of Daly (2006) as the SCAR paper uses it (section 4). Failures come at random at a constant rate,
also during saving and restoring, and each takes one of the job's shards. All times are seconds. Costs are seconds per
hour of undisturbed training.

    nothing       every failure restarts the run
    full          full checkpoints at Daly's optimum; training waits for them; everything is rolled back
    background    full checkpoints copied in memory and written during training; everything is rolled back
    scar          partial checkpoints during training; only the lost shard is restored, from copies of several ages

How far the state moves in an iteration is unknown. So rework is (6) of `scarctl.theory.bounds` for a run on a straight
path: with c = 1, a partial recovery costs √p of the age of the restored copies. A policy's measured effect is `gain`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from scarctl.errors import UsageError
from scarctl.theory.bounds import rework_bound_of_ages
from scarctl.util.document import Document

HOUR = 3600.0
SHARE = 0.8
"""Share of the bandwidth for background checkpoints: the same as for `interval="auto"`."""
FRACTIONS = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)
_GAIN_AT = 1 / 8
USUAL = 1 / 8
"""Default fraction of `attach`: recommended unless another one is clearly better."""
SLIGHT, SLIGHT_SHARE = 3.6, 0.05
"""Costs count as equal if they differ by less than 3.6 s per hour, a thousandth of the time, or by less than 5 %. The
model is not more accurate: it knows neither the machine's noise nor how the state moves."""
_NEVER = 1000.0
"""Hours lost per hour of training above which a job counts as never ending."""
# Points and weights of a mean over an interval (Gauss and Legendre): the integrand is smooth.
_PHASES, _WEIGHTS = np.polynomial.legendre.leggauss(5)
_RATIO = 1.05
_LONGEST = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Job(Document):
    """A training job and its machine. Raises UsageError for values out of range."""

    state_bytes: float
    step_seconds: float
    bandwidth: float
    """Bytes per second that the store reads and writes, over all shards."""
    mtbf_seconds: float
    """Mean seconds between two failures of the job, of any shard."""
    shards: int = 1
    """A failure takes one shard."""
    restart_seconds: float = 60.0
    """Seconds from a failure until the failed shard's process runs again, before restoring."""
    memory_bandwidth: float = 4e9
    """Bytes per second at which one shard compares and copies, as if training waited for all of it."""
    convergence: float = 1.0
    """Convergence rate per iteration; 1: slow progress compared with a checkpoint's age."""
    gain: float = 1.0
    """Squared perturbation of the policy at fraction 1/8, relative to round-robin of the same bytes."""
    duration_seconds: float = 24 * HOUR
    """Seconds of undisturbed training; used for "nothing" alone."""

    def __post_init__(self) -> None:
        times = ("step_seconds", "mtbf_seconds", "duration_seconds")
        for name in ("state_bytes", "bandwidth", "memory_bandwidth", *times, "gain"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise UsageError(f"{name} is {value}, not a number above 0")
        if not 0 <= self.restart_seconds < math.inf:
            raise UsageError(f"restart is {self.restart_seconds}, not 0 or more seconds")
        if self.shards < 1:
            raise UsageError(f"shards is {self.shards}, not 1 or more")
        if not 0 < self.convergence <= 1:
            raise UsageError(f"convergence is {self.convergence}, not above 0 and up to 1")


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds per hour of undisturbed training. Infinite if the job never ends."""

    dump: float
    rework: float
    restart: float

    @property
    def total(self) -> float:
        return self.dump + self.rework + self.restart


@dataclass(frozen=True, slots=True)
class Way:
    """One way of checkpointing, with its cost."""

    name: str
    fraction: float | None
    """Share of the state that a checkpoint saves; None without checkpoints."""
    interval: float
    """Seconds of training between two checkpoints; 0 without checkpoints."""
    cost: Cost


@dataclass(frozen=True, slots=True)
class Advice:
    """All ways compared, each with its best interval."""

    nothing: Way
    full: Way
    background: Way
    scar: Way

    @property
    def ways(self) -> tuple[Way, ...]:
        return self.nothing, self.full, self.background, self.scar

    @property
    def rival(self) -> Way:
        """The cheapest way other than scar."""
        return min((self.nothing, self.full, self.background), key=lambda way: way.cost.total)

    @property
    def pays(self) -> bool | None:
        """Whether partial checkpoints and recovery cost clearly less than every other way; None if about equal."""
        mine, other = self.scar.cost.total, self.rival.cost.total
        return None if about_equal(mine, other) else mine < other


def about_equal(cost: float, other: float) -> bool:
    """Return whether two costs, in seconds per hour, differ by less than the model's accuracy."""
    if math.isinf(cost) or math.isinf(other):
        return cost == other
    return abs(cost - other) < max(SLIGHT, SLIGHT_SHARE * max(cost, other))


def advise(job: Job) -> Advice:
    """Compare all ways, each with its best interval."""
    return Advice(
        Way("nothing", None, 0.0, cost_of_nothing(job)),
        _best_full(job),
        _best_background(job),
        _best_scar(job),
    )


def daly_interval(dump: float, mtbf: float) -> float:
    """Return the optimal seconds between two checkpoints: Daly's higher-order estimate (2006, equation 37)."""
    if dump >= 2 * mtbf:
        return mtbf
    ratio = math.sqrt(dump / (2 * mtbf))
    return math.sqrt(2 * dump * mtbf) * (1 + ratio / 3 + ratio * ratio / 9) - dump


def cost_of_nothing(job: Job) -> Cost:
    """Return the cost of failures that each restart the run of `duration`."""
    return _rolled_back(job, job.duration_seconds, stall=0.0, latency=0.0, restart=job.restart_seconds)


def cost_of_full(job: Job, interval: float) -> Cost:
    """Return the cost of a full checkpoint after every `interval` seconds of training, which waits for it."""
    dump = job.state_bytes / job.bandwidth
    return _rolled_back(job, interval, stall=dump, latency=0.0, restart=job.restart_seconds + dump)


def cost_of_background(job: Job, interval: float) -> Cost:
    """Return the cost of a full checkpoint after every `interval` seconds, written during training."""
    written = job.state_bytes / job.bandwidth
    stall = job.state_bytes / job.shards / job.memory_bandwidth
    return _rolled_back(job, interval, stall=stall, latency=written, restart=job.restart_seconds + written)


def cost_of_scar(job: Job, fraction: float, interval: float) -> Cost:
    """Return the cost of a checkpoint of `fraction` after every `interval` seconds; a failure restores one shard."""
    stall = (1 + fraction) * job.state_bytes / job.shards / job.memory_bandwidth
    slowed = 1 + stall / interval
    rework = mean_rework(job, fraction, interval) * job.step_seconds * slowed
    restart = job.restart_seconds + job.state_bytes / job.shards / job.bandwidth
    # No iteration is repeated, so the costs of failures add up, even of a failure during another recovery.
    left = 1 - (rework + restart) / job.mtbf_seconds
    if left <= 1 / (1 + _NEVER) or math.isinf(rework):
        return Cost(stall / interval * HOUR, math.inf, math.inf)
    failures = slowed / left / job.mtbf_seconds
    return Cost(stall / interval * HOUR, failures * rework * HOUR, failures * restart * HOUR)


def mean_rework(job: Job, fraction: float, interval: float) -> float:
    """Return a failure's mean rework in iterations, with a checkpoint of `fraction` every `interval` seconds.

    Assumes the ages of round-robin copies. A checkpoint still being written at the failure does not count.
    """
    parts = max(1, round(1 / fraction))
    latency = fraction * job.state_bytes / job.bandwidth
    share = math.sqrt(gain_at(job, fraction) / job.shards)
    phases = latency + interval * (_PHASES + 1) / 2
    costs = [
        rework_bound_of_ages(job.convergence, (np.arange(parts) * interval + phase) / job.step_seconds, share)
        for phase in phases.tolist()
    ]
    return float(np.dot(_WEIGHTS, costs)) / 2


def gain_at(job: Job, fraction: float) -> float:
    """Return the policy's gain: the job's at 1/8, 1 at fraction 1, log-linear elsewhere."""
    return float(job.gain ** (math.log(fraction) / math.log(_GAIN_AT)))


def _rolled_back(job: Job, interval: float, *, stall: float, latency: float, restart: float) -> Cost:
    """Return the cost of rolling back to the newest durable checkpoint. Exact for failures at a constant rate.

    From one restart to the next failure a run completes exp(-latency/M) / (exp((interval + stall)/M) - 1) checkpoints
    on average. Without a latency this is Daly's complete model.
    """
    m = job.mtbf_seconds
    try:
        failures = math.exp(latency / m) * math.expm1((interval + stall) / m)
        restarts = math.expm1(restart / m)
    except OverflowError:
        return Cost(stall / interval * HOUR, math.inf, math.inf)
    whole = m * failures * (1 + restarts) / interval
    if whole > 1 + _NEVER:
        return Cost(stall / interval * HOUR, math.inf, math.inf)
    dump, restarting = stall / interval, m * failures * restarts / interval
    return Cost(dump * HOUR, max(0.0, whole - 1 - dump - restarting) * HOUR, restarting * HOUR)


def _best_full(job: Job) -> Way:
    interval = max(daly_interval(job.state_bytes / job.bandwidth, job.mtbf_seconds), job.step_seconds)
    return Way("full", 1.0, interval, cost_of_full(job, interval))


def _best_background(job: Job) -> Way:
    least = max(job.state_bytes / job.bandwidth / SHARE, job.step_seconds)
    interval = max(
        daly_interval(job.state_bytes / job.shards / job.memory_bandwidth, job.mtbf_seconds), least
    )
    return Way("background", 1.0, interval, cost_of_background(job, interval))


def _best_scar(job: Job) -> Way:
    bests = {
        fraction: min(
            (
                Way("scar", fraction, interval, cost_of_scar(job, fraction, interval))
                for interval in _intervals(job, fraction)
            ),
            key=lambda way: (way.cost.total, way.interval),
        )
        for fraction in FRACTIONS
    }
    best = min(bests.values(), key=lambda way: (way.cost.total, way.interval))
    usual = bests[USUAL]
    return usual if about_equal(usual.cost.total, best.cost.total) else best


def _intervals(job: Job, fraction: float) -> Iterator[float]:
    """Yield intervals of whole iterations, 5 % apart, from the shortest that the store sustains."""
    steps = max(1, math.ceil(fraction * job.state_bytes / job.bandwidth / SHARE / job.step_seconds))
    most = max(steps, min(_LONGEST, math.ceil(2 * job.mtbf_seconds / job.step_seconds)))
    while steps <= most:
        yield steps * job.step_seconds
        steps = max(steps + 1, math.floor(steps * _RATIO))
