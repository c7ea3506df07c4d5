"""Estimate a run's pace from a log: seconds per iteration, and interval and size of its checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from scarctl.store.record import Record
from scarctl.store.saved import parse

if TYPE_CHECKING:
    from scarctl.store.store import Store

LEAST_SECONDS = 10
"""Shortest usable time span in seconds: times in records have a resolution of one second."""


@dataclass(frozen=True, slots=True)
class Pace:
    """A run's pace. None: unknown."""

    step_seconds: float | None
    """Seconds from one iteration to the next."""
    interval: int | None
    """Iterations between two checkpoints."""
    checkpoint_bytes: int | None
    """Bytes of the state that a usual checkpoint saves."""


def pace(store: Store) -> Pace:
    """Return the pace of the newest run with enough records. Raises Corruption, Unavailable."""
    return pace_of(record for shard in store.shards() for record in store.log(shard).records())


def pace_of(records: Iterable[Record]) -> Pace:
    """Return the pace from the records of all shards, in any order."""
    runs: dict[int, dict[int, list[Record]]] = {}
    for record in records:
        if record.commits and record.partitions:
            runs.setdefault(record.epoch, {}).setdefault(record.step, []).append(record)
    for _, run in sorted(runs.items(), reverse=True):
        steps = sorted(run)
        seconds = _span(run[steps[0]], run[steps[-1]])
        if len(steps) < 2 or seconds is None or seconds < LEAST_SECONDS:
            continue
        # The first checkpoint of a run saves everything, so it is not a usual one.
        sizes = [sum(record.nbytes for record in run[step]) for step in steps[1:]]
        gaps = [after - before for before, after in itertools.pairwise(steps)]
        return Pace(seconds / (steps[-1] - steps[0]), round(median(gaps)), round(median(sizes)))
    return Pace(None, None, None)


def _span(first: list[Record], last: list[Record]) -> float | None:
    """Return the seconds from the first of some records to the first of others; None if a time cannot be parsed."""
    times = [[parse(record.created) for record in records] for records in (first, last)]
    begin, end = (min((one for one in some if one is not None), default=None) for some in times)
    return None if begin is None or end is None else (end - begin).total_seconds()
