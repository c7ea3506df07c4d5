"""Type the JSON documents of `plan`, `report` and `simulate`: see `scarctl.cli.documents`."""

from __future__ import annotations

from typing import TypedDict

from scarctl.cli.document_parts import Health, Partition, Survey
from scarctl.ops.surveyed import Layer
from scarctl.ops.timeline import Timeline
from scarctl.simulate.calibration import Comparison
from scarctl.simulate.study import Mode
from scarctl.simulate.summary import CellMeans
from scarctl.theory.job_cost import Job


class Odds(TypedDict):
    """The odds that all memory survives some hosts that are lost at once."""

    lost: int
    odds: float


class CopiesOnHosts(TypedDict):
    """Size and benefit of copies of memory on other hosts."""

    hosts: int
    peers: int
    bytes_per_host: float
    survives: list[Odds]


class SecondsPerHour(TypedDict):
    """Seconds that failures and saving cost per hour of training; None: training never ends."""

    dump: float | None
    rework: float | None
    restart: float | None
    total: float | None


class Way(TypedDict):
    """One way of saving: this fraction of the state in each interval. None: nothing is saved."""

    fraction: float | None
    interval: int | None
    """Iterations."""
    interval_seconds: float | None
    seconds_per_hour: SecondsPerHour


class Ways(TypedDict):
    """All ways that are compared."""

    nothing: Way
    full: Way
    background: Way
    scar: Way


class SavedSoFar(TypedDict):
    """A run's pace of saving, according to its store."""

    partitions: int | None
    step_seconds: float | None
    interval: int | None
    fraction: float | None


class StoreTurns(TypedDict):
    """What the store gets without an interval, at most, while all of the state changes all the time."""

    bytes_per_day: int
    requests_per_day: int
    turn_seconds: float
    """Seconds in which all of the state reaches the store."""
    whole: bool
    """Whether every turn is a whole state."""


class Plan(TypedDict):
    """`scarctl plan`."""

    copies: CopiesOnHosts | None
    job: Job
    ways: Ways
    pays: bool | None
    rival: str
    """The best of the other ways."""
    saves: float | None
    """Seconds per hour saved, compared with `rival`."""
    store: StoreTurns
    history: SavedSoFar | None


class ReportedSurvey(Survey):
    """A store's copies, with the partitions at most risk."""

    stalest: list[Partition]


class Report(TypedDict):
    """`scarctl report`. The page contains every field except `output`."""

    made: str
    store: str
    now: ReportedSurvey
    health: Health
    layers: list[Layer]
    more_layers: int
    history: Timeline
    output: str


class Study(TypedDict):
    """Everything that the result of a trial depends on. Shares are fractions such as "1/2"."""

    workload: str
    data: str | None
    lost: list[str]
    fractions: list[str]
    policies: list[str]
    modes: list[Mode]
    interval: int
    failure_rate: float | None
    fail_after: int | None
    stratify: bool
    smooth: int
    iterations: int | None
    target: float | None
    norm: str | None
    seed: int


class _Simulate(TypedDict):
    study: Study
    trials: int
    undisturbed: float
    irreproducible: int
    cells: list[CellMeans]
    plot: str | None


class Simulate(_Simulate, total=False):
    """`scarctl simulate`."""

    predictions: Comparison
