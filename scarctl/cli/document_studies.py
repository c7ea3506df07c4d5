"""Type the JSON documents of `plan`, `report` and `simulate`: see `scarctl.cli.documents`."""

from __future__ import annotations

from typing import Literal, TypedDict

from scarctl.cli.document_parts import Health, Partition, Survey


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


class Job(TypedDict):
    """A training job: bytes, seconds, and bytes per second."""

    state_bytes: float
    step_seconds: float
    bandwidth: float
    mtbf_seconds: float
    shards: int
    restart_seconds: float
    memory_bandwidth: float | None
    convergence: float | None
    gain: float | None
    duration_seconds: float | None


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
    history: SavedSoFar | None


class ReportedSurvey(Survey):
    """A store's copies, with the partitions at most risk."""

    stalest: list[Partition]


class Layer(TypedDict):
    """All partitions of one group, on all ranks."""

    name: str
    partitions: int
    bytes: int
    oldest: int | None
    """Age of its oldest copy in iterations; None: a partition was never saved."""
    distance: float | None


class Point(TypedDict):
    """The steps of a store's copies at one moment; -1: a partition was never saved."""

    at: str
    newest: int
    median: float
    oldest: int


class Start(TypedDict):
    """A writer's beginning."""

    at: str
    epoch: int
    step: int
    after_failure: bool


class History(TypedDict):
    """The newest part of a store's history, as far back as its logs reach."""

    points: list[Point]
    starts: list[Start]
    layers: list[str]
    saved: list[list[float]]
    """By layer and span of time: partitions that were saved, as a share of the layer's."""
    spans: list[str]
    commits: int
    bytes: int
    damage: str | None
    """Why it cannot be shown."""


class Report(TypedDict):
    """`scarctl report`. The page contains every field except `output`."""

    made: str
    store: str
    now: ReportedSurvey
    health: Health
    layers: list[Layer]
    more_layers: int
    history: History
    output: str


class Cell(TypedDict):
    """One way of saving and recovering, and the share of the state that is lost; None: all of it."""

    mode: Literal["partial", "rollback", "extrapolate"]
    policy: str
    fraction: float
    lost: float | None


class Mean(TypedDict):
    """A mean with its interval; None with too few trials."""

    mean: float
    low: float | None
    high: float | None


class CellMeans(Cell):
    """The means of one cell's trials, in iterations."""

    rework: Mean
    median: float
    reduction: Mean | None
    """1 - rework / the rollback's rework."""
    perturbation: float
    given_up: int
    """Trials that did not reach the target."""


class Study(TypedDict):
    """Everything that the result of a trial depends on. Shares are fractions such as "1/2"."""

    workload: str
    data: str | None
    lost: list[str]
    fractions: list[str]
    policies: list[str]
    modes: list[Literal["partial", "rollback", "extrapolate"]]
    interval: int
    failure_rate: float | None
    fail_after: int | None
    iterations: int | None
    target: float | None
    norm: str | None
    seed: int


class Predicted(TypedDict):
    """Predictions of one cell, or of all of them, from distances or from ages."""

    cell: Cell | None
    basis: Literal["distances", "ages"]
    failures: int
    unchanged: int
    """Failures that lost only unchanged values."""
    estimates: int
    """Other failures with a prediction."""
    predicted: float | None
    simulated: float | None
    within_bound: float | None
    within_interval: float | None
    correlation: float | None


class ModesOfCell(TypedDict):
    """Mean rework of a cell's failures, by mode of recovery."""

    cell: Cell
    partial: float
    rollback: float
    auto: float
    rolled_back: int


class Predictions(TypedDict):
    """How well rework is predicted."""

    rows: list[Predicted]
    ways: list[ModesOfCell]


class _Simulate(TypedDict):
    study: Study
    trials: int
    undisturbed: float
    irreproducible: int
    cells: list[CellMeans]
    plot: str | None


class Simulate(_Simulate, total=False):
    """`scarctl simulate`."""

    predictions: Predictions
