"""Keep what the records of hosts in the store say, read again as they change, and keep this host's own record there."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from scarctl.errors import ScarError, Unavailable
from scarctl.store import Store
from scarctl.store.backends.connect import blobs_at
from scarctl.store.format import HOSTS, SETTINGS
from scarctl.store.hosts import (
    HostRecord,
    gone_hosts,
    host_marks,
    read_host,
    remove_hosts,
    write_host,
)

log = logging.getLogger("scarctl")

_REWRITE = 40.0
"""Age in seconds at which this host's record is written again by the next look."""
_REREAD = 300.0
"""Seconds after which records of hosts that do not concern this one are read again."""


@dataclass(slots=True)
class _Read:
    """A record that was read: None if it is damaged."""

    mark: str
    record: HostRecord | None
    at: float


class KnownHosts:
    """The records of one store's hosts. All calls are of one thread, except `hurry`."""

    def __init__(
        self, store: Store, place: str, clock: Callable[[], float], now: Callable[[], float]
    ) -> None:
        """Prepare, without a request. place: that of this host. clock: returns seconds since the epoch.

        now: returns seconds on a clock that never goes back.
        """
        # Connections of its own: a session's end does not wait for a request here.
        blobs = blobs_at(store.address)
        self._store = Store(store.address, blobs, store.id, store.settings)
        self._place = place
        self._clock, self._now = clock, now
        self._known: dict[str, _Read] = {}
        self._written: HostRecord | None = None
        self._prepared = False
        self._rewrite = _REWRITE

    def read(self, near: Collection[str], kept: Collection[str], *, all_of_them: bool) -> None:
        """Read the records that have changed, and remove those of hosts that are gone.

        near: places whose records are read whenever they have changed; others too with all_of_them, otherwise now and
        then. kept: places of connected hosts, which stay known without a record.

        Raises AccessDenied, Unavailable, Corruption. What was known stays known then.
        """
        store, now = self._store, self._now()
        marks = host_marks(store)
        if self._place not in marks and not store.blobs.has(SETTINGS):
            raise Unavailable(f"{store.url} is away")  # an empty folder in its place has no hosts
        for place in self._known.keys() - marks.keys() - set(kept):
            del self._known[place]
        for place, mark in marks.items():
            known = self._known.get(place)
            if known is not None:
                same = bool(mark) and mark == known.mark
                later = not all_of_them and place not in near and now < known.at + _REREAD
                if same or (later and known.record is not None):
                    continue
            self._known[place] = _Read(mark, read_host(store, place), now)
        gone = [
            place for place in gone_hosts(self.records, self._clock(), [self._place]) if place not in kept
        ]
        remove_hosts(store, [place for place in gone if place in marks])
        for place in gone:
            del self._known[place]

    @property
    def records(self) -> dict[str, HostRecord]:
        """The records by place, this host's included."""
        return {place: read.record for place, read in self._known.items() if read.record is not None}

    @property
    def own(self) -> HostRecord | None:
        """This host's record, as it is in the store."""
        read = self._known.get(self._place)
        return None if read is None else read.record

    def write(self, record: HostRecord) -> None:
        """Write this host's record if it is missing, old or different.

        Another process of this host may write it, too. Its choice of hosts stays until this one's changes.

        Raises AccessDenied, Unavailable, Corruption.
        """
        there = self.own
        changed = self._written is None or self._written.to != record.to
        wanted = record if there is None or changed else replace(record, to=there.to)
        if (
            there is not None
            and there == replace(wanted, written=there.written)
            and there.age(self._clock()) < self._rewrite
        ):
            self._written = self._written or there
            return
        try:
            if not self._prepared:
                if not self._store.blobs.has(SETTINGS):
                    raise Unavailable(f"{self._store.url} is away")
                self._store.blobs.prepare(HOSTS)
                self._prepared = True
            write_host(self._store, wanted)
        except ScarError:
            self._prepared = False
            raise
        self._written = record  # with this process's own choice
        self._known[self._place] = _Read("", wanted, self._now())
        self._rewrite = _REWRITE * random.uniform(0.75, 1.0)

    def hurry(self) -> None:
        """Have requests under way fail soon, until `close`."""
        self._store.blobs.hurry()

    def close(self) -> None:
        """Release the connections."""
        self._store.close()
