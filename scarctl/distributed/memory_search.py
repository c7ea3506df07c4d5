"""Search the hosts that a store names for a member's newest memory, and bring it here before its arena is opened."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from scarctl.config import SessionSettings
from scarctl.distributed.credentials import Credentials, digest_of_place
from scarctl.errors import ScarError
from scarctl.peers.fetch import fetch_memory
from scarctl.peers.sender import Candidate
from scarctl.store import Store
from scarctl.store.hosts import HostRecord, read_hosts

log = logging.getLogger("scarctl")

_MOST = 128
"""Most hosts that are asked: those that do not answer delay a start, by 3 s for each 32."""


def search_memory(views: Sequence[Store], settings: SessionSettings, credentials: Credentials) -> int:
    """Bring the newest memory of these shards to this host, if other hosts have it. Return of how many it was brought.

    views: views of one store. A search that fails costs a warning: the store has what it has.
    """
    try:
        records = read_hosts(views[0]) if views else {}
        hosts = candidates_of(records.values(), digest_of_place(settings), time.time())
        tls = credentials.tls()
    except ScarError as error:
        log.warning("other hosts are not searched for memory: %s", error)
        return 0
    found = 0
    for view in views if hosts else ():
        try:
            brought = fetch_memory(
                view, settings.arena_dir, hosts, credentials.start, bytes.fromhex(credentials.secret), tls
            )
        except ScarError as error:
            log.warning("%s: memory on other hosts is not used: %s", view.url, error)
            continue
        if brought is not None:
            found += 1
    return found


def candidates_of(records: Iterable[HostRecord], own: str, now: float) -> list[Candidate]:
    """Return the daemons of other hosts than `own`, at most 128: those first that wrote their record lately.

    own: place of this host.
    """
    others = sorted((one for one in records if one.place != own), key=lambda one: one.age(now))
    return [Candidate(one.host, one.address, one.port) for one in others[:_MOST]]
