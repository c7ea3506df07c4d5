"""Hold the result of a survey of a store, and compute its lines: per shard, per rank and per partition."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl.config.options import DEFAULT_MAX_LAG
from scarctl.ops.ages import Age
from scarctl.recovery.forecast import rework_of
from scarctl.recovery.plan import Perturbation
from scarctl.state.caveats import Caveat
from scarctl.state.encodings import Encoding
from scarctl.state.held import MEMORY, STORE, Held, told_places
from scarctl.state.journal import Event, Sample
from scarctl.state.layouts import Layouts, parameters_of
from scarctl.store import Snapshot, Topology
from scarctl.store.saved import seconds_since
from scarctl.theory.rework import Outlook, Rework
from scarctl.util.arrays import Ids
from scarctl.util.document import INTERNAL, Document, json_of

_NO_REWORK = Rework(0.0, 0.0, 0.0, "ages")
_UNKNOWN = Perturbation(None, "unknown")
_NEVER = np.iinfo(np.int64).max
LAYERS = 20
"""Layers that a document lists."""


@dataclass(frozen=True, slots=True)
class RunOnHost(Document):
    """The processes on this host that save to a store, as their arenas describe them."""

    pid: int
    """Id of one of the processes, a live one if possible."""
    alive: bool
    head_step: int
    """The newest step of all processes."""
    pending_partitions: int
    """Number of partitions with a pending copy: while a run trains, memory is nearly always newer than the store."""
    memory_age: int | None
    """Iterations since the oldest copy in memory; None if a partition has no copy there."""
    lag_steps: int
    """Iterations since the oldest of the store's copies that memory has newer; 0 if the store has all of memory."""
    errors: int
    """Failures in the training processes."""
    failed_saves: int
    """Failed attempts to write to the store, which are retried."""
    interval: int | None = None
    """Iterations between two checkpoints; None if unknown."""
    overhead: float | None = None
    """Measured share of training time that checkpoints take, of the process with the largest; None if unknown."""


@dataclass(frozen=True, slots=True)
class ShardLine(Document):
    """The copies of one shard, and the predicted cost of losing it."""

    shard: int
    partitions: int = 0
    bytes: int = 0
    oldest_step: int | None = None
    """Step of its oldest copy; None if no partition was ever saved."""
    newest_step: int | None = None
    never_saved: int = 0
    """Number of partitions without a copy."""
    staleness: int | None = field(default=None, metadata=INTERNAL)
    """Iterations since its oldest copy was saved; None if no partition was ever saved."""
    perturbation: Perturbation = _UNKNOWN
    """The change if the shard were restored."""
    share: float = 0.0
    """Its fraction of all parameter partitions, from 0 to 1."""
    expected_perturbation: float | None = 0.0
    """The same norm for a random shard of this size; None if a distance is unknown."""
    rework: Rework = _NO_REWORK
    """Predicted rework of a partial recovery of the shard."""


@dataclass(frozen=True, slots=True)
class Layer(Document):
    """All partitions of one parameter or buffer, on all ranks."""

    name: str
    partitions: int
    bytes: int
    oldest: int | None
    """Age of its oldest copy in iterations; None: a partition was never saved."""
    oldest_changed: int | None
    """The same of the copies that differ from memory's, or from the live values as far as known; 0 without such."""
    distance: float | None
    """Norm of the change since its copies were saved; None if unknown."""


@dataclass(frozen=True, slots=True)
class RankLine(Document):
    """One rank: its shard, and its process. Fields of the process are None if its memory is not on this host."""

    rank: int
    shard: int
    durable_step: int | None
    """The newest step that it has saved; None before the first."""
    head_step: int | None
    pid: int | None
    alive: bool | None
    pending_partitions: int | None
    errors: int | None
    failed_saves: int | None
    replica_of: str | None = None
    """Host that the copy belongs to; None if the memory is this host's own."""
    copies: tuple[str, ...] = ()
    """Copies of its memory on other hosts, in words, such as "b: following, 4 behind"."""


@dataclass(frozen=True, slots=True)
class OtherShard(Document):
    """A shard of ranks that have left the job."""

    shard: int
    epoch: int | None
    """Epoch of the newest topology with this shard; None if no topology has it."""
    bytes: int
    """Size of its files."""
    retired: bool
    """Its partitions were given up: its files are not needed."""


@dataclass(frozen=True)
class Survey:
    """A store at one moment. Arrays are over all partitions of the layout, in order."""

    url: str
    step: int | None
    """The newest known step of the run; None if unknown."""
    layout: Layouts | None
    """Layout of the state; None if the store has no commit, and this host no arena."""
    shard_of: NDArray[np.int32]
    saved_step: NDArray[np.int64]
    """Step of the newest copy; -1: never saved."""
    distance: NDArray[np.float64]
    """Distance of this host's memory from the store's copies, see `scarctl.arena.distances`; NaN: unknown."""
    usage: Mapping[str, int]
    """Numbers of files and bytes: see `Store.usage`."""
    age: Age
    outlook: Outlook
    """The convergence of the run, for predictions."""
    snapshots: tuple[Snapshot, ...] = ()
    run: RunOnHost | None = None
    """Status of the run; None if no process of it was on this host. Copies for other hosts do not count."""
    ended: frozenset[int] = frozenset()
    """Ended ranks of this host whose newest step is completely in the store; 0 for a process that trains alone."""
    topology: Topology | None = None
    """Topology of the ranks that save to the store; None for a process that saves alone."""
    ranks: tuple[RankLine, ...] = ()
    """Lines by rank; empty for a process that saves alone."""
    others: tuple[OtherShard, ...] = ()
    note: str | None = None
    """The reason why a newer state was passed over; None if this is the newest."""
    comparable: bool = False
    """Distances are in the norm that the outlook uses."""
    since: int = 0
    """Iterations since the distances were measured."""
    caveats: tuple[Caveat, ...] = ()
    """Caveats of the run that saved this state."""
    kept_step: NDArray[np.int64] | None = None
    """Step of the newest copy in this host's memory, per partition; -1: no copy. None: no arena is on this host."""
    memory_seconds: float | None = None
    """Seconds since the newest checkpoint in this host's memory; None if unknown, or without one."""
    max_lag: float = DEFAULT_MAX_LAG
    """Seconds after which the store should have the whole state, as the run on this host says."""
    waiting: NDArray[np.bool_] | None = None
    """Whether each partition's copy in this host's memory is newer than the store's; None: as if none is."""
    events: tuple[Event, ...] = ()
    """Starts, resumes and recoveries of that run, as of its newest checkpoint."""
    samples: tuple[Sample, ...] = ()
    """Ages of its copies over time."""
    damage: tuple[tuple[str, str], ...] = ()
    """Damaged files with newest copies, and the reason, as far as names and sizes show it."""
    damaged: NDArray[np.bool_] | None = None
    """Whether each partition's newest copy in the store is in a damaged file; None: no copy is."""
    hidden: bool = False
    """Whether damage may hide newer copies in the store than those known."""
    encoded: Mapping[Encoding, int] = field(default_factory=dict)
    """Number of newest copies in the store that are not exact, by their encoding."""
    encoding_error: NDArray[np.float64] | None = None
    """Squared error of the store's copy of each parameter, as far as this host's memory knows it; None: nothing is."""
    heads: NDArray[np.int64] | None = None
    """The newest known step of each partition's member: members have no common step. None without members."""

    @property
    def head(self) -> NDArray[np.int64]:
        """The newest known step of each partition, or one for all: int64, of shape (partitions,) or ()."""
        return np.array(self.step or 0) if self.heads is None else self.heads

    @property
    def reached(self) -> str:
        """How far the run is, in words: "step 320", "step 320 or later", or "finished at step 320"."""
        if self.age.finished:
            return f"finished at step {self.step}"
        return f"step {self.step}{' or later' if self.age.is_lower_bound else ''}"

    @property
    def ages(self) -> str:
        """What this host's memory and the store have, and how old that is, in words."""
        memory = None if self.kept_step is None else Held.of(self.kept_step, self.memory_seconds)
        store = Held.of(self.saved_step, seconds_since(self.age.saved_at))
        head = self.step or 0
        return told_places({MEMORY: memory, STORE: store}, head, least=self.age.is_lower_bound)

    @cached_property
    def staleness(self) -> NDArray[np.int64]:
        """Iterations since each partition was saved; -1: never saved."""
        return np.where(self.saved_step < 0, -1, np.maximum(self.head - self.saved_step, 0))

    @cached_property
    def shards(self) -> list[ShardLine]:
        """Return a line for each shard that has partitions, in ascending order."""
        if self.layout is None:
            return []
        parameters = parameters_of(self.layout)
        total = max(1, int(np.count_nonzero(parameters)))
        moved = self.distance[parameters]
        whole = _norm(moved) if np.isfinite(moved).all() else math.nan
        # numpy sorts numbers of up to 16 bits by their digits, ten times as fast. np.unique would load numpy.ma.
        width = np.min_scalar_type(self.shard_of.max(initial=0))
        order = np.argsort(self.shard_of.astype(width), kind="stable")
        numbers = self.shard_of[order]
        first = np.flatnonzero(np.diff(numbers, prepend=-1))
        # All columns are reordered at once, because a shard's partitions are scattered.
        columns = (self.saved_step, self.staleness, self.distance, self.layout.partition_bytes, parameters)
        parts = zip(*(np.split(column[order], first[1:]) for column in columns), strict=True)
        lines = []
        for shard, (steps, stale, distance, nbytes, of_parameters) in zip(
            numbers[first].tolist(), parts, strict=False
        ):
            saved = steps[steps >= 0]
            norm = _norm(distance)
            share = int(np.count_nonzero(of_parameters)) / total
            rework = rework_of(
                self.outlook,
                share,
                ages=np.maximum(stale[of_parameters], 0),
                distance=distance[of_parameters] if self.comparable else None,
                since=self.since,
            )
            lines.append(
                ShardLine(
                    shard,
                    partitions=len(steps),
                    bytes=int(nbytes.sum()),
                    oldest_step=int(saved.min()) if len(saved) else None,
                    newest_step=int(saved.max()) if len(saved) else None,
                    never_saved=len(steps) - len(saved),
                    staleness=int(stale.max()) if len(saved) else None,
                    perturbation=Perturbation(norm, "estimated") if math.isfinite(norm) else _UNKNOWN,
                    share=share,
                    expected_perturbation=math.sqrt(share) * whole if math.isfinite(whole) else None,
                    rework=rework,
                )
            )
        return lines

    @cached_property
    def layers(self) -> list[Layer]:
        """Return a line for each parameter and buffer that has partitions, in the order of the layout."""
        if self.layout is None:
            return []
        names = list(dict.fromkeys(group.name for group in self.layout.groups))
        number = {name: k for k, name in enumerate(names)}
        of = np.array([number[group.name] for group in self.layout.groups], dtype=np.int64)
        which = of[self.layout.group_of(np.arange(self.layout.partitions))]
        count = np.bincount(which, minlength=len(names))
        nbytes = np.bincount(which, self.layout.partition_bytes, len(names))
        ages = np.where(self.staleness < 0, _NEVER, self.staleness)
        oldest, changed = np.zeros((2, len(names)), dtype=np.int64)
        np.maximum.at(oldest, which, ages)
        same = self.distance == 0
        if self.waiting is not None:
            same &= ~self.waiting
        np.maximum.at(changed, which, np.where(same, 0, ages))
        with np.errstate(over="ignore", invalid="ignore"):
            distance = np.sqrt(np.bincount(which, np.square(self.distance), len(names)))
        return [
            Layer(
                name,
                int(count[k]),
                int(nbytes[k]),
                None if oldest[k] == _NEVER else int(oldest[k]),
                None if changed[k] == _NEVER else int(changed[k]),
                float(distance[k]) if np.isfinite(distance[k]) else None,
            )
            for k, name in enumerate(names)
            if count[k]
        ]

    def stalest_layers(self, count: int) -> list[Layer]:
        """Return the `count` layers with the oldest copies of changed values. Never saved ones come first."""
        found = [layer for layer in self.layers if layer.oldest_changed != 0]
        never = [layer for layer in found if layer.oldest_changed is None]
        aged = [layer for layer in found if layer.oldest_changed is not None]
        return (never + sorted(aged, key=lambda layer: -(layer.oldest_changed or 0)))[:count]

    @property
    def effective_staleness(self) -> float | None:
        """Iterations in which the parameters now move as far as they are from all copies; None: unknown."""
        if self.layout is None or not self.comparable:
            return None
        norm = _norm(self.distance[parameters_of(self.layout)])
        return self.outlook.staleness(norm) if math.isfinite(norm) else None

    @property
    def shards_of_ranks(self) -> list[tuple[RankLine, ShardLine]]:
        """Return every rank with the line of its shard."""
        by_shard = {line.shard: line for line in self.shards}
        return [(rank, by_shard.get(rank.shard) or ShardLine(rank.shard)) for rank in self.ranks]

    def partitions(self, ids: Ids) -> list[dict[str, Any]]:
        """Return the fields of a document for each of `ids`."""
        if self.layout is None or not len(ids):
            return []
        groups = [group.name for group in self.layout.groups]
        starts, stops = self.layout.row_ranges(ids)
        columns = zip(
            self.layout.group_of(ids).tolist(),
            starts.tolist(),
            stops.tolist(),
            self.shard_of[ids].tolist(),
            self.layout.partition_bytes[ids].tolist(),
            self.saved_step[ids].tolist(),
            self.staleness[ids].tolist(),
            self.distance[ids].tolist(),
            np.isfinite(self.distance[ids]).tolist(),
            strict=True,
        )
        return [
            {
                "name": f"{groups[g]}[{start}:{stop}]",
                "group": groups[g],
                "start": start,
                "stop": stop,
                "shard": shard,
                "bytes": nbytes,
                "saved_step": saved if saved >= 0 else None,
                "staleness": stale if stale >= 0 else None,
                "distance": distance if known else None,
            }
            for g, start, stop, shard, nbytes, saved, stale, distance, known in columns
        ]

    def stalest(self, count: int) -> list[dict[str, Any]]:
        """Return the `count` partitions with the oldest copies, as `partitions` does. Never saved ones come first."""
        return self.partitions(_least(self.saved_step, count))

    def most_changed(self, count: int) -> list[dict[str, Any]]:
        """Return the `count` partitions farthest from their saved copy, of those whose distance is known and not 0."""
        known = np.flatnonzero(np.isfinite(self.distance) & (self.distance > 0))
        return self.partitions(known[_least(-self.distance[known], count)])

    def to_json(self, limit: int | None) -> dict[str, Any]:
        """Return the fields of the document, with the first `limit` partitions of the layout; None: all partitions."""
        total = len(self.saved_step)
        return {
            "step": self.step,
            **self.age.to_json(),
            "memory_seconds_ago": None if self.memory_seconds is None else round(self.memory_seconds, 3),
            "total_partitions": total,
            "total_bytes": 0 if self.layout is None else self.layout.nbytes,
            "shards": json_of(self.shards),
            "partitions": self.partitions(np.arange(total if limit is None else min(limit, total))),
            "stalest_layers": json_of(self.stalest_layers(LAYERS)),
            "encoded_partitions": dict(self.encoded),
            "store": dict(self.usage),
            "snapshots": json_of(self.snapshots),
            "run": json_of(self.run),
            "caveats": json_of(self.caveats),
            "damage": [{"file": file, "reason": reason} for file, reason in self.damage],
            "events": json_of(self.events),
            "convergence": None if self.layout is None else self.outlook.to_json(),
            "effective_staleness": self.effective_staleness,
            **self._ranks_json(),
        }

    def _ranks_json(self) -> dict[str, Any]:
        if self.topology is None:
            return {}
        return {
            "topology": {
                "world": self.topology.world,
                "members": self.topology.independent,
                "epoch": self.topology.epoch,
                "shards": list(self.topology.shards),
                "created": self.topology.created,
                "note": self.note,
            },
            "ranks": [
                {**line.to_json(), "staleness": line.staleness, **rank.to_json()}
                for rank, line in self.shards_of_ranks
            ],
            "other_shards": json_of(self.others),
        }


def _least(values: NDArray[Any], count: int) -> Ids:
    """Return the indices of the `count` least values, the least first, ties by index. No value is NaN."""
    among = np.arange(len(values))
    if count < len(values):
        # np.partition finds the largest of them without sorting.
        among = np.flatnonzero(values <= np.partition(values, count - 1)[count - 1])
    found: Ids = among[np.argsort(values[among], kind="stable")[:count]]
    return found


def _norm(distances: NDArray[np.float64]) -> float:
    """Return the norm over these partitions. Does not use BLAS, which would wake threads for each shard."""
    with np.errstate(over="ignore", invalid="ignore"):
        return math.sqrt(np.square(distances).sum())
