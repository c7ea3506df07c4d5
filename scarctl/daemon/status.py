"""Type the daemon's status, which `scarctl daemon status --json` shows. Steps are -1 before the first."""

from __future__ import annotations

from typing import TypedDict

from scarctl.peers.link import State
from scarctl.persist.space import SpaceFields

NO_HOST = f"no host yet: {State.ABSENT.value}"
"""A copy in `RunStatus` for which there is no host."""
_UNPROTECTED = frozenset(state.value for state in (State.ABSENT, State.LOST, State.REPLACED, State.FENCED))
"""States of a link in which the other host receives no new copies."""
_COMPLETE = ("up to date", " behind", "too large")
"""Ends of the copies in words that are complete: see `Sender.describe`."""


class ShardSteps(TypedDict):
    """Durable steps of one shard of a run."""

    shard: int
    durable_step: int
    """The newest durable step."""
    oldest_durable_step: int


class _Claimed(TypedDict):
    store: str
    id: str
    pid: int
    """Process id of the training process, 0 if unknown."""
    phase: str
    """One of `scarctl.daemon.lifecycle.Phase`."""
    open: bool
    """Whether the fields of `RunStatus` are present."""
    peers: list[str]
    """The copies of its memory on other hosts, in words: "b: following, 4 behind"."""


class RunStatus(_Claimed, total=False):
    """One run. The first three fields are present for one of several ranks or members, the others once it is open."""

    shard: int
    rank: int | None
    """Number of the rank or member; None if unknown."""
    member: bool
    """Whether it is a member."""
    head_step: int
    durable_step: int
    oldest_durable_step: int
    sealed_step: int
    """Step of the newest durable sealed checkpoint."""
    shards: list[ShardSteps] | None
    """None if there are too many to list."""
    queued_partitions: int
    queued_bytes: int
    saved_at: str | None
    """UTC time of the newest request that became durable, in ISO 8601."""
    saved_bytes: int
    bytes_per_second: int
    space: SpaceFields | None
    errors: int
    last_error: str | None
    stopped: bool
    """Whether saving has stopped permanently."""


def part_of(run: RunStatus) -> str:
    """Return "rank 2" or "member 2"; "" for a process that trains alone, or if its number is unknown."""
    if run.get("rank") is None:
        return ""
    return f"{'member' if run.get('member') else 'rank'} {run['rank']}"


def is_unprotected(link: str) -> bool:
    """Return whether the other host of a copy in `RunStatus.peers` receives no new copies."""
    return link.rpartition(": ")[2].partition(",")[0] in _UNPROTECTED


def kept_copies(run: RunStatus) -> int:
    """Return how many of the copies in `peers` are complete, and receive what changes."""
    return sum(link.endswith(_COMPLETE) and not is_unprotected(link) for link in run.get("peers", ()))


class ReplicaStatus(TypedDict):
    """A replica of another host's arena that is being written."""

    id: str
    """Id of the run."""
    host: str
    """Name of the owner's host."""
    head_step: int
    complete: bool
    """Whether the replica is complete, so that recovery finds it."""


class MetricsStatus(TypedDict):
    """Where the daemon publishes its figures; see `scarctl.daemon.outlet`."""

    file: str | None
    listen: str | None
    """Host and port of the HTTP endpoint."""
    ready: bool
    """Whether the file and the endpoint have worked."""
    fault: str | None


class DaemonStatus(TypedDict):
    """The reply to the request "status"."""

    pid: int
    started: float
    """Seconds since the epoch of the system's clock."""
    runs: list[RunStatus]
    replicas: list[ReplicaStatus]
    claims: int
    """Number of runs that have begun since the daemon started."""
    metrics: MetricsStatus
