"""Type the parts that several JSON documents share: see `scarctl.cli.documents`. Steps are finished iterations."""

from __future__ import annotations

from typing import Literal, TypeAlias, TypedDict

from scarctl.ops.health import Finding, Loss, Saving
from scarctl.ops.surveyed import Layer, OtherShard, RunOnHost, ShardLine
from scarctl.recovery.plan import Perturbation
from scarctl.state.caveats import Caveat
from scarctl.theory.rework import Rework

Tiers: TypeAlias = dict[str, int]
"""Numbers of partitions by source: "live", "memory", "peer", "store"."""


class ErrorFields(TypedDict):
    """Why a command failed."""

    kind: str
    """Stable name for programs: docs/troubleshooting.md lists them."""
    message: str
    hint: str
    """What to do next; "" if nothing is known."""
    exit_code: int


class Labelled(TypedDict):
    """A state with its label, as `scarctl.state.label.Label` has it."""

    oldest_step: int | None
    """Step of the oldest partition; None without any."""
    newest_step: int | None
    """Step of the newest partition; None without any."""
    consistent: bool
    """Everything that was given to `attach` is of one step, as one commit saved it. `reasons` says why not."""
    reasons: list[str]
    """Reasons why the state is mixed, one sentence each. Empty if it is consistent."""
    position: Literal["declared", "unknown"] | None
    """Whether the position in the data was saved, because the loop had declared it. None: it has none."""


class Snapshot(TypedDict):
    """A whole state of one step, kept under a name."""

    name: str
    step: int
    epoch: int
    created: str


class DamagedFile(TypedDict):
    """A file that is missing, cut short or unreadable, with the newest copies of some partitions."""

    file: str
    reason: str


class Event(TypedDict):
    """An event of a run: a start, a resume or a recovery. Further fields depend on its kind."""

    kind: str
    at: str
    """UTC time, in ISO 8601."""
    step: int


class RankCopies(TypedDict):
    """One rank: its shard, and its process. Fields of the process are None if its memory is not on this host."""

    staleness: int | None
    """Iterations since its oldest copy was saved."""


class Topology(TypedDict):
    """The ranks or members that save to a store."""

    world: int
    members: bool
    epoch: int
    shards: list[int]
    created: str
    note: str | None


class Partition(TypedDict):
    """One partition, and the age of its copy."""

    name: str
    group: str
    start: int
    """First row."""
    stop: int
    """Row after the last."""
    shard: int
    bytes: int
    saved_step: int | None
    staleness: int | None
    """Iterations since it was saved; None if it never was."""
    distance: float | None
    """Norm of the change since it was saved."""


class Usage(TypedDict):
    """Space that a store takes on disk."""

    bytes: int
    live_bytes: int
    """Bytes of the newest copies."""
    segments: int
    records: int


class Convergence(TypedDict):
    """The fitted rate of convergence, from which rework is predicted."""

    c: float | None
    c_interval: list[float] | None
    distance: float | None
    distance_interval: list[float] | None
    points: int | None
    speed: float | None
    reason: str | None
    """Why it is unknown."""


class _Survey(TypedDict):
    step: int | None
    """The newest step that is known; None if nothing is saved."""
    saved_at: str | None
    saved_seconds_ago: float | None
    memory_seconds_ago: float | None
    """Seconds since the newest checkpoint in this host's memory; None if unknown."""
    age_is_lower_bound: bool
    """Whether the run may be further than `step`."""
    total_partitions: int
    total_bytes: int
    shards: list[ShardLine]
    partitions: list[Partition]
    stalest_layers: list[Layer]
    """The parameters and buffers with the oldest copies of changed values, at most 20."""
    encoded_partitions: dict[str, int]
    """Newest copies in the store in fewer bits, by their encoding: see `Selection.encoding`."""
    store: Usage
    snapshots: list[Snapshot]
    run: RunOnHost | None
    caveats: list[Caveat]
    damage: list[DamagedFile]
    """Damaged files, as far as names and sizes show it: `scarctl verify` reads all."""
    events: list[Event]
    convergence: Convergence | None
    effective_staleness: float | None
    """Iterations in which the parameters now move as far as they are from all copies."""


class Survey(_Survey, total=False):
    """A store's copies, and their ages. The last three fields are present if several ranks or members save to it."""

    topology: Topology
    ranks: list[RankCopies]
    other_shards: list[OtherShard]


class RestoredShard(TypedDict):
    """The restored partitions of one shard."""

    shard: int
    partitions: int
    bytes: int
    tiers: Tiers
    oldest_step: int
    newest_step: int


class RestoredOfRank(RestoredShard):
    """The restored partitions of one shard of a rank."""

    rank: int
    age: int


class RecoveredRanks(TypedDict):
    """The ranks of a store, and those that were restored completely."""

    world: int
    lost: list[int]


class _Restored(Labelled):
    mode: Literal["partial", "rollback"]
    degraded: bool
    """Whether an older copy had to be used instead of the newest one."""
    step: int | None
    snapshot: str | None
    lost_partitions: int
    restored_partitions: int
    bytes: int
    tiers: Tiers
    encoded_partitions: int
    """Restored from encoded copies, which have fewer bits."""
    perturbation: Perturbation
    rework: Rework
    rollback_steps: int | None
    """Iterations that a rollback would repeat."""
    reason: str | None
    """Why this mode was chosen."""
    output: str | None
    """None: restored in place."""
    seconds: float | None
    problems: list[str]


class Restored(_Restored):
    """A recovery."""

    shards: list[RestoredShard]


class RestoredRanks(_Restored):
    """A recovery from a store of several ranks or members."""

    shards: list[RestoredOfRank]
    ranks: RecoveredRanks


class SavedByProcess(Labelled):
    """A checkpoint of a running session."""

    step: int
    total_partitions: int
    saved_partitions: int
    total_bytes: int
    saved_bytes: int
    durable: bool
    pid: int


class SavedByRank(SavedByProcess):
    """A checkpoint of one rank."""

    rank: int


class Losses(TypedDict, total=False):
    """The cost of losing the process, the host or the store. Empty if nothing is saved."""

    process: Loss
    host: Loss
    store: Loss


class _Health(TypedDict):
    store: str
    well: bool
    findings: list[Finding]
    if_lost: Losses
    shards: list[ShardLine]
    """The shards with partitions that were never saved."""
    saving: list[Saving]


class Health(_Health, total=False):
    """A store's problems, and the cost of losses. The last five fields are present if the store can be read."""

    step: int | None
    saved_at: str | None
    saved_seconds_ago: float | None
    memory_seconds_ago: float | None
    run: RunOnHost | None
