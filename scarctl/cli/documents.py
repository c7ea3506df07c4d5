"""Type the JSON document of each command, as `--json` prints it. `scarctl help --schemas` publishes these types.

Every document also has `schema_version` and `command`. None is null. `scarctl.cli.schemas` makes JSON Schemas of them.
A result that is a `scarctl.util.document.Document` stands for the JSON object of its fields.
"""

from __future__ import annotations

from typing import TypedDict

from scarctl.arena.stale import StaleArena
from scarctl.cli.document_parts import (
    ErrorFields,
    Health,
    Labelled,
    Restored,
    RestoredRanks,
    SavedByProcess,
    SavedByRank,
    Snapshot,
    Survey,
)
from scarctl.daemon.status import MetricsStatus, ReplicaStatus, RunStatus
from scarctl.ops.verify_memory import MemoryCheck
from scarctl.store.check import Problem
from scarctl.theory.rework import Rework


class Error(TypedDict):
    """A command that failed."""

    error: ErrorFields


class _DaemonStarted(TypedDict):
    pid: int
    folder: str
    already_running: bool


class DaemonStarted(_DaemonStarted, total=False):
    """`scarctl daemon start`. `metrics` is present if requested."""

    metrics: MetricsStatus


class _DaemonShown(TypedDict):
    running: bool
    folder: str
    pid: int | None
    uptime_seconds: float | None
    runs: list[RunStatus]
    replicas: list[ReplicaStatus]
    metrics: MetricsStatus | None
    stale: list[StaleArena]


class DaemonShown(_DaemonShown, total=False):
    """`scarctl daemon status`. `error` is present if no daemon runs."""

    error: ErrorFields


class DaemonStopped(TypedDict):
    """`scarctl daemon stop`."""

    pid: int | None
    dry_run: bool
    """Whether nothing was done, and the other fields say what would be."""
    runs: list[RunStatus]
    """The runs for which saving has ended."""
    live_runs: int
    reaped: list[StaleArena]
    stale: list[StaleArena]


class _EvacuatedProcess(TypedDict):
    store: str
    rank: int | None
    pid: int
    safe: bool
    error: str | None


class EvacuatedProcess(_EvacuatedProcess, total=False):
    """The evacuated copies of one process. The fields of `Evacuated` are missing if it did not answer."""


class EvacuatedStore(Labelled):
    """The evacuated copies of one store's state, of all processes on this host."""

    store: str
    safe: bool
    rework: Rework
    processes: list[EvacuatedProcess]


class Evacuate(TypedDict):
    """`scarctl evacuate`."""

    deadline: float
    safe: bool
    stores: list[EvacuatedStore]
    in_memory: list[str]
    """Folders of memory with copies that no daemon saves."""


class EvacuatePlanned(TypedDict):
    """`scarctl evacuate --dry-run`."""

    deadline: float
    dry_run: bool
    runs: list[RunStatus]
    """The runs that would be evacuated."""
    in_memory: list[str]
    """See `Evacuate`."""


class InspectedStore(Survey):
    """`scarctl inspect --store S`."""


class _LiveSaved(SavedByProcess):
    live: bool
    full: bool


class LiveCheckpoint(_LiveSaved, total=False):
    """`scarctl live checkpoint`. The last fields are present if several ranks or members save to the store."""

    snapshot: str
    world: int
    members: bool
    complete: bool
    """Whether every rank or member was reached."""
    ranks: list[SavedByRank]


class RestoredByRank(TypedDict):
    """The restored partitions of one rank."""

    restored_partitions: int
    bytes: int


class LiveRecover(Restored):
    """`scarctl live recover`."""

    saved_at: str | None
    live: bool
    pid: int
    head_step: int
    by_rank: list[RestoredByRank]


class Prune(TypedDict):
    """`scarctl prune`."""

    deleted_snapshots: list[Snapshot]
    kept_snapshots: list[Snapshot]
    kept_sealed_steps: list[int]
    dropped_sealed_steps: list[int]
    live_writer: str | None
    files: int
    freed_bytes: int
    moved_bytes: int
    bytes: int | None
    live_bytes: int | None
    dry_run: bool


class PruneOfRanks(Prune):
    """`scarctl prune` of a store of several ranks."""

    retired_shards: list[int]


class Recover(Restored):
    """`scarctl recover`."""

    saved_at: str | None
    dry_run: bool


class RecoverOfRanks(RestoredRanks):
    """`scarctl recover` of a store of several ranks."""

    saved_at: str | None
    dry_run: bool


class SnapshotCreatedLive(LiveCheckpoint):
    """`scarctl snapshot create NAME` of a running session."""


class SnapshotList(TypedDict):
    """`scarctl snapshot list`."""

    snapshots: list[Snapshot]


class Status(TypedDict):
    """`scarctl status`."""

    well: bool
    stores: list[Health]


class VerifiedStore(TypedDict):
    """`scarctl verify --store S`."""

    intact: bool
    empty: bool
    read_data: bool
    read_data_subset: str | None
    data_bytes: int
    files: int
    bytes: int
    records: int
    segments: int
    orphans: int
    damaged_partitions: int
    problems: list[Problem]
    memory: list[MemoryCheck]


class Version(TypedDict):
    """`scarctl version`."""

    version: str
    python: str
    executable: str
