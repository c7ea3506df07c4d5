"""Measure the speed of saving to a store, and how long the saving threads wait for a processor."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from scarctl.util.document import Document

_NEW = 0.2
"""Weight of a new measurement."""
_LARGE = 0.5
"""Requests with at least this fraction of the largest one's bytes count as large."""


@dataclass(frozen=True, slots=True)
class Speed(Document):
    """Statistics of the newest requests that were served."""

    bytes_per_second: float
    """Bytes per second while a request is being served."""
    commits_per_second: float
    request_seconds: float
    """Seconds to serve a request of ordinary size."""
    fixed_share: float | None
    """Fraction of that time that does not depend on bytes; None without a request of another size to compare with."""
    processor_share: float
    """Fraction of their time that the saving threads waited for a processor; 0 if unknown."""

    @staticmethod
    def from_json(obj: Any) -> Speed | None:
        """Read the values of `to_json`; return None for anything else."""
        names = [field.name for field in fields(Speed)]
        if not isinstance(obj, Mapping) or not all(name in obj for name in names):
            return None
        values = {name: obj[name] for name in names}
        numbers = [value for name, value in values.items() if name != "fixed_share" or value is not None]
        if not all(isinstance(value, int | float) and value >= 0 for value in numbers):
            return None
        return Speed(**values)


class _Mean:
    """Exponentially weighted means of several numbers."""

    def __init__(self) -> None:
        self.values: tuple[float, ...] | None = None

    def add(self, *values: float) -> None:
        before = self.values or values
        self.values = tuple(b + _NEW * (v - b) for b, v in zip(before, values, strict=True))


class Meter:
    """Measures one persister. Use one thread at a time."""

    def __init__(self) -> None:
        self._small, self._large = _Mean(), _Mean()  # bytes, seconds, commits, share
        self._most = 0
        self._begin()

    def _begin(self) -> None:
        self._commits, self._seconds, self._delay = 0, 0.0, 0.0

    @contextmanager
    def commit(self, count: int = 1) -> Iterator[None]:
        """Measure the commits of `count` shards, in the thread that makes them, alone or with others."""
        started, before = time.perf_counter(), _run_delay()
        try:
            yield
        finally:
            seconds, delay = time.perf_counter() - started, _run_delay() - before
            self._commits += count
            self._seconds += seconds
            self._delay += delay

    def served(self, nbytes: int, seconds: float) -> None:
        """Count a request whose commits are all durable."""
        share = min(1.0, self._delay / self._seconds) if self._seconds > 0 else 0.0
        if nbytes > 0:
            if nbytes > self._most / _LARGE:
                self._small = _Mean()  # requests that counted as large are small compared with this one
            self._most = max(self._most, nbytes)
            kind = self._large if nbytes >= self._most * _LARGE else self._small
            kind.add(nbytes, seconds, self._commits, share)
        self._begin()

    def speed(self) -> Speed | None:
        """Return the statistics; None before the first request."""
        found = self._small.values or self._large.values
        if found is None:
            return None
        nbytes, seconds, commits, share = found
        fixed = None
        if self._small.values is not None and self._large.values is not None:
            # The line through both means, extrapolated to zero bytes.
            most, longest = self._large.values[:2]
            slope = max(0.0, (longest - seconds) / (most - nbytes)) if most > nbytes else 0.0
            fixed = min(1.0, max(0.0, 1 - slope * nbytes / seconds)) if seconds > 0 else None
        seconds = max(seconds, 1e-9)
        return Speed(nbytes / seconds, commits / seconds, seconds, fixed, share)


def _run_delay() -> float:
    """Return the seconds that this thread has waited for a processor; 0 if unknown."""
    try:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
            return int(file.read(64).split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
