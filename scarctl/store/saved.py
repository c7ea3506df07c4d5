"""Find the time of a store's last save, from the wall-clock times of records. They are only for display."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

from scarctl.errors import Corruption
from scarctl.store.log import ShardLog

if TYPE_CHECKING:
    from scarctl.store.store import Store

_FAR = 200
"""Most records of a shard that are read."""
_UNITS = (("day", 86_400), ("hour", 3_600), ("minute", 60), ("second", 1))


def last_saved(store: Store, shards: Iterable[int] | None = None) -> str | None:
    """Return the UTC time of the newest commit of some shards, all by default, in ISO 8601; None if no record has it.

    Damaged records are ignored. Raises Unavailable, AccessDenied.
    """
    found = store.blobs.each(
        lambda s: _of_shard(store.log(s)), list(store.shards() if shards is None else shards)
    )
    times = [moment for moment in map(parse, (created for created in found if created is not None)) if moment]
    return max(times).isoformat(timespec="seconds") if times else None


def _of_shard(log: ShardLog) -> str | None:
    """Return the time of a lane's newest commit, or of the oldest record after it, if that one was collected."""
    oldest = None
    with contextlib.suppress(Corruption, FileNotFoundError):
        newest = log.newest()
        for record in islice(log.back(None if newest is None else newest.place), _FAR):
            if record.commits:
                return record.created
            oldest = record.created if record.step >= 0 else None
    return oldest


def parse(created: str) -> datetime.datetime | None:
    """Return a record's time; None if it cannot be parsed, or has no time zone."""
    try:
        moment = datetime.datetime.fromisoformat(created)
        return moment.astimezone(datetime.timezone.utc) if moment.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None


def seconds_since(created: str | None) -> float | None:
    """Return the seconds since a time of `last_saved`; None if unknown. At least 0, because hosts' clocks differ."""
    moment = parse(created) if created is not None else None
    if moment is None:
        return None
    return max(0.0, (datetime.datetime.now(datetime.timezone.utc) - moment).total_seconds())


def describe(created: str | None) -> str:
    """Format a time of `last_saved` for display: "saved 2026-11-22 21:20:11 UTC, 3 minutes ago"."""
    moment, seconds = parse(created) if created is not None else None, seconds_since(created)
    if moment is None or seconds is None:
        return "time of the last save unknown"
    return f"saved {moment:%Y-%m-%d %H:%M:%S} UTC, {_roughly(seconds)} ago"


def _roughly(seconds: float) -> str:
    """Return a time span in its largest unit."""
    name, length = next(((name, length) for name, length in _UNITS if seconds >= length), _UNITS[-1])
    count = int(seconds // length)
    return f"{count} {name}{'' if count == 1 else 's'}"
