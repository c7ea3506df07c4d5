"""Replay the logs of a store: the copies that it had over time, the starts of its run, and the layers that it saved."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from scarctl.errors import Corruption
from scarctl.state.layout import Layout
from scarctl.state.version import step_of
from scarctl.store import Store
from scarctl.store.record import Record
from scarctl.store.saved import parse
from scarctl.util.arrays import Ids
from scarctl.util.document import Document

MOST_RECORDS = 4000
"""Most records that are replayed, over all shards, newest first."""
MOST_POINTS = 200
"""Most moments at which the ages of all copies are computed."""
COLUMNS = 48
"""Number of time spans in the map of layers."""
_ATTEMPTS = 3
"""Most attempts to replay while a writer collects."""


@dataclass(frozen=True, slots=True)
class Point(Document):
    """The copies that a store had at one moment."""

    at: str
    """UTC time, in ISO 8601."""
    newest: int
    """The newest saved step."""
    median: float
    """Median of the steps of all copies; -1 counts for a partition that was never saved."""
    oldest: int
    """Step of the oldest copy; -1: a partition was never saved."""


@dataclass(frozen=True, slots=True)
class Start(Document):
    """The beginning of a writer."""

    at: str
    epoch: int
    step: int
    """The newest step that the store had."""
    after_failure: bool
    """Whether the previous writer ended without a sealed commit."""


@dataclass(frozen=True, slots=True)
class Timeline(Document):
    """The newest part of a store's history, as far back as its logs and their segments reach."""

    points: tuple[Point, ...] = ()
    starts: tuple[Start, ...] = ()
    layers: tuple[str, ...] = ()
    """Names of groups."""
    saved: tuple[tuple[float, ...], ...] = ()
    """For each layer and span of time: partitions that commits saved, as a share of the layer's. May exceed 1.
    Commits whose segments are gone are left out."""
    spans: tuple[str, ...] = ()
    """The time at which each span begins."""
    commits: int = 0
    """Commits whose records are there."""
    bytes: int = 0
    """Bytes of partitions that these commits wrote."""
    damage: str | None = None
    """Why it cannot be shown."""


class _Moment(NamedTuple):
    """One record, with the steps of all copies of its shard after it."""

    record: Record
    layout: Layout
    ids: Ids | None
    """The partitions that it saved; None: its segment is gone."""
    steps: Ids | None
    """None: not known, because a segment is gone."""


def timeline(store: Store, shards: Sequence[int]) -> Timeline:
    """Replay the logs of these shards. Raises Corruption, AccessDenied, Unavailable."""
    for attempt in range(_ATTEMPTS):
        try:
            return _timeline(store, shards)
        except Corruption:
            # The writer may have collected records that were about to be read.
            if attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


def _timeline(store: Store, shards: Sequence[int]) -> Timeline:
    most = max(1, MOST_RECORDS // max(1, len(shards)))
    tops = [store.log(shard).newest_top(around=True) for shard in shards]
    total = sum(min(most, top.count) for top in tops if top is not None)
    number = 0
    of_shard: dict[int, Ids | None] = {}
    ended: dict[int, bool] = {}
    points: list[Point] = []
    starts: dict[int, Start] = {}
    commits: list[_Moment] = []
    moments = heapq.merge(*(_moments(store, shard, most) for shard in shards), key=_time)
    for moment in moments:
        record = moment.record
        of_shard[record.shard] = moment.steps
        if record.first and record.epoch == record.place.number:
            dirty = not ended.get(record.shard, True)
            known = starts.get(record.epoch)
            failed = dirty or (known is not None and known.after_failure)
            starts[record.epoch] = Start(record.created, record.epoch, max(record.step, 0), failed)
        elif record.commits:
            ended[record.shard] = record.sealed
            commits.append(moment)
        steps = [one for one in of_shard.values() if one is not None]
        if len(steps) < len(of_shard):
            total -= 1
            continue
        number += 1
        if number % max(1, -(-total // MOST_POINTS)) == 0 or number >= total:
            points += _point(record.created, steps)
    layers, saved, spans = _layers(commits)
    nbytes = sum(moment.record.nbytes for moment in commits)
    return Timeline(tuple(points), tuple(starts.values()), layers, saved, spans, len(commits), nbytes)


def _moments(store: Store, shard: int, most: int) -> Iterator[_Moment]:
    for record, layout, ids, state in store.log(shard).replay(most):
        yield _Moment(record, layout, ids, None if state is None else step_of(state.version))


def _time(moment: _Moment) -> tuple[float, int, int]:
    at = parse(moment.record.created)
    return at.timestamp() if at is not None else 0.0, moment.record.shard, moment.record.seq


def _point(at: str, of_shards: Sequence[Ids]) -> list[Point]:
    steps = np.concatenate(of_shards)
    if not steps.size:
        return []
    return [Point(at, int(steps.max()), float(np.median(steps)), int(steps.min()))]


def _layers(
    moments: Sequence[_Moment],
) -> tuple[tuple[str, ...], tuple[tuple[float, ...], ...], tuple[str, ...]]:
    """Return names of layers, the share of each that was saved in each span, and the times of the spans."""
    commits = [(moment, moment.ids) for moment in moments if moment.ids is not None]
    if not commits:
        return (), (), ()
    times = np.array([_time(moment)[0] for moment, _ in commits])
    wide = times[-1] - times[0] >= COLUMNS
    # Records have times of whole seconds: in a short run each commit is a span of its own.
    order = (
        (times - times[0]) / (times[-1] - times[0] + 1) if wide else np.arange(len(commits)) / len(commits)
    )
    columns = min(COLUMNS, len(commits))
    column = (order * columns).astype(int)
    totals: dict[str, int] = {}
    counted: set[str] = set()
    saved: dict[str, np.ndarray[Any, np.dtype[np.float64]]] = {}
    for at, (moment, ids) in zip(column.tolist(), commits, strict=True):
        layout = moment.layout
        if layout.digest not in counted:
            counted.add(layout.digest)
            for group in layout.groups:
                totals[group.name] = totals.get(group.name, 0) + group.partitions
        if ids.size:
            of, counts = np.unique(layout.group_of(ids), return_counts=True)
            for g, count in zip(of.tolist(), counts.tolist(), strict=True):
                saved.setdefault(layout.groups[g].name, np.zeros(columns))[at] += count
    names = [name for name in totals if totals[name]]
    none = np.zeros(columns)
    rows = tuple(tuple((saved.get(name, none) / totals[name]).tolist()) for name in names)
    first = [commits[int(np.argmax(column >= c))][0].record.created for c in range(columns)]
    return tuple(names), rows, tuple(first)
