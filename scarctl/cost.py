"""What failures cost a job for each way to be prepared for them: T = T_solve + T_dump + T_rework + T_restart.

That is the model of Daly (2006) as the SCAR paper uses it (section 4). Failures come at random at a constant rate,
also while something is saved or restored, and each takes one of the job's shards. All times are seconds; a cost is in
seconds per hour of undisturbed training.

    nothing       every failure begins the run again
    full          full checkpoints, for which training waits, at Daly's optimum; everything is rolled back
    background    full checkpoints that are copied in memory and written beside training; everything is rolled back
    scar          partial checkpoints beside training; only the lost shard is restored, from copies of several ages

How far a state moves in an iteration cannot be known here. So rework is (6) of `scarctl.theory` for a run that goes
straight to its optimum: with c = 1, a partial recovery costs √p of the age of what it restores. What a policy adds to
that is `gain`, as measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from scarctl.errors import UsageError
from scarctl.theory import rework_bound_of_ages

HOUR = 3600.0
SHARE = 0.8
"""Of the bandwidth, what background checkpoints may take: the same as for `interval="auto"`."""
FRACTIONS = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)
_GAIN_AT = 1 / 8
# Points and weights of a mean over an interval (Gauss and Legendre): the integrand is smooth.
_PHASES, _WEIGHTS = np.polynomial.legendre.leggauss(5)
_RATIO = 1.05
_LONGEST = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A training job and where it runs. Bad values are refused at construction."""

    state_bytes: float
    step_seconds: float
    bandwidth: float
    """Bytes per second that the store takes and gives, over all shards."""
    mtbf: float
    """Mean seconds between two failures of the job, whichever shard fails."""
    shards: int = 1
    """A failure takes one of them."""
    restart: float = 60.0
    """Seconds from a failure until what failed is replaced, before anything is restored."""
    memory_bandwidth: float = 4e9
    """Bytes per second at which one shard compares and copies; as if nothing of that went on beside training."""
    c: float = 1.0
    """Convergence rate per iteration; 1: progress is slow beside a checkpoint's age."""
    gain: float = 1.0
    """Squared perturbation of the policy at 1/8, relative to round-robin of the same bytes."""
    duration: float = 24 * HOUR
    """Seconds of undisturbed training; it matters where nothing is saved."""

    def __post_init__(self) -> None:
        names = ("state_bytes", "step_seconds", "bandwidth", "mtbf", "memory_bandwidth", "duration", "gain")
        for name in names:
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise UsageError(f"{name} is {value}, not a number above 0")
        if not 0 <= self.restart < math.inf:
            raise UsageError(f"restart is {self.restart}, not a number of seconds from 0 on")
        if self.shards < 1:
            raise UsageError(f"shards is {self.shards}, not 1 or more")
        if not 0 < self.c <= 1:
            raise UsageError(f"c is {self.c}, not above 0 and up to 1")


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds per hour of undisturbed training. Infinite where the job never ends."""

    dump: float
    rework: float
    restart: float

    @property
    def total(self) -> float:
        return self.dump + self.rework + self.restart


@dataclass(frozen=True, slots=True)
class Way:
    """One way to be prepared."""

    name: str
    fraction: float | None
    """Of the state, what a checkpoint saves; None without checkpoints."""
    interval: float
    """Seconds of training between two checkpoints; 0 without."""
    cost: Cost


@dataclass(frozen=True, slots=True)
class Advice:
    """All ways beside each other."""

    nothing: Way
    full: Way
    background: Way
    scar: Way

    @property
    def ways(self) -> tuple[Way, ...]:
        return self.nothing, self.full, self.background, self.scar

    @property
    def rival(self) -> Way:
        """The best of the others."""
        return min((self.nothing, self.full, self.background), key=lambda way: way.cost.total)

    @property
    def pays(self) -> bool:
        """Whether partial checkpoints and recovery cost less than every other way."""
        return self.scar.cost.total < self.rival.cost.total


def advise(job: Job) -> Advice:
    """Every way at its best."""
    return Advice(
        Way("nothing", None, 0.0, cost_of_nothing(job)),
        _best_full(job),
        _best_background(job),
        _best_scar(job),
    )


def daly_interval(dump: float, mtbf: float) -> float:
    """Seconds of training between two checkpoints, by Daly's higher-order estimate (2006, equation 37)."""
    if dump >= 2 * mtbf:
        return mtbf
    ratio = math.sqrt(dump / (2 * mtbf))
    return math.sqrt(2 * dump * mtbf) * (1 + ratio / 3 + ratio * ratio / 9) - dump


def cost_of_nothing(job: Job) -> Cost:
    """Every failure begins the run of `duration` again."""
    return _rolled_back(job, job.duration, stall=0.0, latency=0.0, restart=job.restart)


def cost_of_full(job: Job, interval: float) -> Cost:
    """A full checkpoint after every `interval` seconds of training, which waits for it."""
    dump = job.state_bytes / job.bandwidth
    return _rolled_back(job, interval, stall=dump, latency=0.0, restart=job.restart + dump)


def cost_of_background(job: Job, interval: float) -> Cost:
    """A full checkpoint after every `interval` seconds of training, durable only when it is written."""
    written = job.state_bytes / job.bandwidth
    stall = job.state_bytes / job.shards / job.memory_bandwidth
    return _rolled_back(job, interval, stall=stall, latency=written, restart=job.restart + written)


def cost_of_scar(job: Job, fraction: float, interval: float) -> Cost:
    """A checkpoint of `fraction` after every `interval` seconds of training; a failure restores one shard."""
    stall = (1 + fraction) * job.state_bytes / job.shards / job.memory_bandwidth
    slowed = 1 + stall / interval
    rework = mean_rework(job, fraction, interval) * job.step_seconds * slowed
    restart = job.restart + job.state_bytes / job.shards / job.bandwidth
    # Nothing is done twice because of a failure, so each adds its own cost, also one while another is mended.
    left = 1 - (rework + restart) / job.mtbf
    if left <= 0 or math.isinf(rework):
        return Cost(stall / interval * HOUR, math.inf, math.inf)
    failures = slowed / left / job.mtbf
    return Cost(stall / interval * HOUR, failures * rework * HOUR, failures * restart * HOUR)


def mean_rework(job: Job, fraction: float, interval: float) -> float:
    """Iterations that a failure costs on average, where a checkpoint of `fraction` comes every `interval` seconds.

    Copies are as old as if the parts took turns, and what is being written when a failure comes is not there yet.
    """
    parts = max(1, round(1 / fraction))
    latency = fraction * job.state_bytes / job.bandwidth
    share = math.sqrt(gain_at(job, fraction) / job.shards)
    phases = latency + interval * (_PHASES + 1) / 2
    costs = [
        rework_bound_of_ages(job.c, (np.arange(parts) * interval + phase) / job.step_seconds, share)
        for phase in phases.tolist()
    ]
    return float(np.dot(_WEIGHTS, costs)) / 2


def gain_at(job: Job, fraction: float) -> float:
    """The policy's gain: the job's at 1/8, none where everything is saved, and even steps between."""
    return float(job.gain ** (math.log(fraction) / math.log(_GAIN_AT)))


def _rolled_back(job: Job, interval: float, *, stall: float, latency: float, restart: float) -> Cost:
    """Everything goes back to the newest durable checkpoint. Exact for failures at a constant rate.

    From one restart to the next failure a run secures, on average, exp(-latency/M) / (exp((interval + stall)/M) - 1)
    checkpoints; without a latency this is Daly's complete model.
    """
    m = job.mtbf
    try:
        failures = math.exp(latency / m) * math.expm1((interval + stall) / m)
        restarts = math.expm1(restart / m)
    except OverflowError:
        return Cost(stall / interval * HOUR, math.inf, math.inf)
    whole = m * failures * (1 + restarts) / interval
    dump, restarting = stall / interval, m * failures * restarts / interval
    return Cost(dump * HOUR, max(0.0, whole - 1 - dump - restarting) * HOUR, restarting * HOUR)


def _best_full(job: Job) -> Way:
    interval = max(daly_interval(job.state_bytes / job.bandwidth, job.mtbf), job.step_seconds)
    return Way("full", 1.0, interval, cost_of_full(job, interval))


def _best_background(job: Job) -> Way:
    least = max(job.state_bytes / job.bandwidth / SHARE, job.step_seconds)
    interval = max(daly_interval(job.state_bytes / job.shards / job.memory_bandwidth, job.mtbf), least)
    return Way("background", 1.0, interval, cost_of_background(job, interval))


def _best_scar(job: Job) -> Way:
    ways = [
        Way("scar", fraction, interval, cost_of_scar(job, fraction, interval))
        for fraction in FRACTIONS
        for interval in _intervals(job, fraction)
    ]
    return min(ways, key=lambda way: (way.cost.total, way.interval))


def _intervals(job: Job, fraction: float) -> Iterator[float]:
    """Whole iterations, from as often as the store keeps up with to far too seldom, a few percent apart."""
    steps = max(1, math.ceil(fraction * job.state_bytes / job.bandwidth / SHARE / job.step_seconds))
    most = min(_LONGEST, max(steps, math.ceil(2 * job.mtbf / job.step_seconds)))
    while steps <= most:
        yield steps * job.step_seconds
        steps = max(steps + 1, math.floor(steps * _RATIO))
