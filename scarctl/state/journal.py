"""Keep a bounded journal of a run, saved with its checkpoints: starts, resumes, recoveries, and ages of copies."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Fact: TypeAlias = str | int | float | bool | None

MOST = 64
"""Number of newest events that are kept."""
MOST_SAMPLES = 128
"""Most samples that are kept over the whole run. If there are more, every second one is dropped."""
_LEAST_GAP = 0.5
"""Seconds between two samples at the beginning of a run."""
_TEXT = 200
"""Most characters of a text, and most facts of an event, that are read back. Extras may be hostile."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a run."""

    kind: str
    """"started", "resumed", "recovered", "ranks differ" or "ranks agree"."""
    at: str
    """UTC time, in ISO 8601, for display."""
    step: int
    """Iterations finished at the event's end."""
    facts: Mapping[str, Fact] = field(default_factory=dict)
    """Facts by name: see `Journal`."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields for JSON documents and extras."""
        return {"kind": self.kind, "at": self.at, "step": self.step, **self.facts}


class Sample(NamedTuple):
    """Ages of the copies at one moment."""

    seconds: float
    """Unix time."""
    head: float
    """Iterations finished."""
    copied: float
    """Step of the oldest copy in memory, among partitions changed since; -1: a partition had no copy."""
    durable: float
    """Step of the oldest such copy in the store, as far as this host's memory knows."""
    stall: float
    """Seconds for which this session has delayed training so far."""


class Journal:
    """The events of a run over its restarts, oldest first.

    "started": process, as host:pid. "resumed": the fields of `scarctl.state.label.Label`, but its reasons; mode
    ("partial" or "rollback"); reached, the newest step that the run is known to have finished before; partitions,
    memory, peer and store: the number of restored ones, and of those from each tier; perturbation, a norm; low and
    high, the predicted rework in iterations. Without mode and what follows `reached` if the state was saved under
    another division. "recovered": the same, but `reached`, for lost partitions in a running process. "closed": the
    run was closed properly after this step.
    """

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._samples: list[Sample] = []
        self._gap = _LEAST_GAP

    def add(self, kind: str, step: int, **facts: Fact) -> None:
        """Add an event, with the current time. Numbers that are not finite are left out."""
        known = {name: value for name, value in facts.items() if _finite(value)}
        at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self._events = [*self._events, Event(kind, at, step, known)][-MOST:]

    def follow(self, earlier: Iterable[Event], samples: object = None) -> None:
        """Put the events and the samples (see `samples`) of the run that this one continues before its own."""
        self._events = [*earlier, *self._events][-MOST:]
        self._samples = [*read_samples(samples), *self._samples]
        if len(self._samples) > 1:
            self._gap = max(_LEAST_GAP, (self._samples[-1].seconds - self._samples[0].seconds) / MOST_SAMPLES)

    def due(self, seconds: float) -> bool:
        """Return whether a sample should be added at this Unix time."""
        return not self._samples or not 0 <= seconds - self._samples[-1].seconds < self._gap

    def sample(self, sample: Sample) -> None:
        """Add a sample."""
        self._samples.append(sample)
        if len(self._samples) > MOST_SAMPLES:
            self._samples = self._samples[::2]
            self._gap *= 2

    @property
    def samples(self) -> NDArray[np.float64] | None:
        """The samples for a checkpoint's extras: float64 of shape (samples, 5); None without one."""
        return np.array(self._samples, dtype=np.float64) if self._samples else None

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)


def read_events(stored: object) -> tuple[Event, ...]:
    """Read a list of the values of `Event.to_json`. Takes hostile input: entries that are not events are skipped."""
    events = []
    for entry in stored[:MOST] if isinstance(stored, list) else ():
        if not (isinstance(entry, dict) and len(entry) <= _TEXT):
            continue
        kind, at, step = (entry.get(name) for name in ("kind", "at", "step"))
        if not (isinstance(kind, str) and isinstance(at, str) and type(step) is int and 0 <= step < 1 << 63):
            continue
        facts = {
            name[:_TEXT]: value[:_TEXT] if isinstance(value, str) else value
            for name, value in entry.items()
            if isinstance(name, str) and name not in ("kind", "at", "step") and _plain(value)
        }
        events.append(Event(kind[:_TEXT], at[:_TEXT], step, facts))
    return tuple(events)


def read_samples(stored: object) -> list[Sample]:
    """Read the result of `Journal.samples`. Anything else gives an empty list: only a report depends on it."""
    if not (isinstance(stored, np.ndarray) and stored.dtype == np.float64 and stored.ndim == 2):
        return []
    if stored.shape[1] != len(Sample._fields) or len(stored) > MOST_SAMPLES or not np.isfinite(stored).all():
        return []
    return [Sample(*row) for row in stored.tolist()]


def _plain(value: object) -> bool:
    if type(value) is int:
        return abs(value) < 1 << 63
    return isinstance(value, str | bool | float | None) and _finite(value)


def _finite(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
