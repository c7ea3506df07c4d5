"""Type the daemon's status, which `scarctl daemon status --json` shows. Steps are -1 before the first."""

from __future__ import annotations

from typing import Any, TypedDict


class ShardSteps(TypedDict):
    """How far one shard of a run is durable."""

    shard: int
    durable_step: int
    """The newest."""
    oldest_durable_step: int


class _Claimed(TypedDict):
    store: str
    id: str
    pid: int
    """The training process, 0 when the system does not say."""
    phase: str
    """One of `scarctl.daemon.lifecycle.Phase`."""
    open: bool
    """Whether the fields about saving are there."""
    peers: list[str]


class RunStatus(_Claimed, total=False):
    """One run. `shard` and `rank` are there for one rank of several, the other fields once it is open."""

    shard: int
    rank: int | None
    head_step: int
    durable_step: int
    oldest_durable_step: int
    shards: list[ShardSteps] | None
    """None when there are too many to list."""
    queued_partitions: int
    queued_bytes: int
    saved_at: str | None
    """UTC time of the newest hand-over that became durable, in ISO 8601."""
    saved_bytes: int
    bytes_per_second: int
    speed: dict[str, Any] | None
    """The fields of `scarctl.persist.speed.Speed`."""
    space: dict[str, Any] | None
    """See `scarctl.persist.persister.Persister.space`."""
    errors: int
    last_error: str | None
    stopped: bool
    """Whether saving has stopped for good."""


class DaemonStatus(TypedDict):
    """The answer to the question "status"."""

    pid: int
    started: float
    """Seconds since the epoch of the system's clock."""
    runs: list[RunStatus]
