"""Search the hosts that a store names for a shard's newest memory, and bring it here before its arena is opened."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Sequence

from scarctl.arena.age import Age
from scarctl.config import SessionSettings
from scarctl.distributed.credentials import Credentials
from scarctl.distributed.host_address import digest_of_place, place_of
from scarctl.errors import ScarError
from scarctl.peers.fetch import Asker, fetch_memory
from scarctl.peers.sender import Candidate
from scarctl.store import Store
from scarctl.store.hosts import HostRecord, gone_hosts, read_hosts, remove_hosts

log = logging.getLogger("scarctl")

_NOT_SEARCHED = "other hosts are not searched for memory"
_MOST = 128
"""Most hosts that are asked: those that do not answer delay a start, by 3 s for each 32."""


def search_memory(views: Sequence[Store], settings: SessionSettings, credentials: Credentials) -> int:
    """Bring the newest memory of a member's shards to this host, if other hosts have it. Return of how many it was.

    views: views of one store. A search that fails costs a warning: the store has what it has.
    """
    own = {digest_of_place(place_of(settings))}
    hosts = recorded_hosts(views[0], own) if views else []
    asker = asker_of(credentials) if hosts else None
    return 0 if asker is None else sum(bring(view, settings, hosts, asker) for view in views)


def recorded_hosts(store: Store, own: Collection[str]) -> list[Candidate]:
    """Return the daemons that the store names, on other hosts than `own`. Removes the records of hosts that are gone.

    own: places. A failure costs a warning.
    """
    now = time.time()
    try:
        records = read_hosts(store)
        gone = gone_hosts(records, now, own)
        remove_hosts(store, gone)
    except ScarError as error:
        log.warning("%s: %s", _NOT_SEARCHED, error)
        return []
    return candidates_of((one for place, one in records.items() if place not in gone), own, now)


def asker_of(credentials: Credentials) -> Asker | None:
    """Return how to ask other hosts; None, with a warning, if the files of TLS are not usable."""
    try:
        return Asker(credentials.start, bytes.fromhex(credentials.secret), credentials.tls())
    except ScarError as error:
        log.warning("%s: %s", _NOT_SEARCHED, error)
        return None


def bring(
    view: Store,
    settings: SessionSettings,
    hosts: Sequence[Candidate],
    asker: Asker,
    than: Age | None = None,
) -> bool:
    """Bring the newest memory of a shard from other hosts to this one. Return whether that was done.

    than: see `fetch_memory`. A failure costs a warning.
    """
    try:
        return fetch_memory(view, settings.arena_dir, hosts, asker, than=than) is not None
    except ScarError as error:
        log.warning("%s: memory on other hosts is not used: %s", view.url, error)
        return False


def candidates_of(records: Iterable[HostRecord], own: Collection[str], now: float) -> list[Candidate]:
    """Return the daemons of other hosts than `own`, at most 128: those first that wrote their record lately.

    own: places.
    """
    others = sorted((one for one in records if one.place not in own), key=lambda one: one.age(now))
    return [Candidate(one.host, one.address, one.port) for one in others[:_MOST]]
