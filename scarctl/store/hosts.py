"""Read and write the records of hosts: how hosts that share only a store find each other (docs/FORMAT.md, section 11).

A host writes `peers/<place>.json` again and again, so that others know it. The records are hints: only the proof of a
common secret decides who sends copies to whom (`scarctl.peers.handshake`). Nothing else in a store depends on them, and
everything in them may be false.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING

from scarctl.errors import Corruption
from scarctl.store.format import FORMAT, HOSTS, Fields, corrupt, dump_json, is_hex, load_json
from scarctl.util.text import printable

if TYPE_CHECKING:
    from scarctl.store.store import Store

log = logging.getLogger("scarctl")

STALE = 600.0
"""Seconds after which a host that has not written its record again may be gone."""
GONE = 86_400.0
"""Seconds after which a record is removed: other hosts keep replicas as long."""
MOST_HOSTS = 1024
"""Most records that are read."""
MAX_HOST = 16 << 10
MOST_TEXT = 300
"""Most characters of a name in a record."""
_MOST_TO, _MOST_TIME = 64, 1 << 40
_NAME = re.compile(r"([0-9a-f]{16})\.json", re.ASCII)


@dataclass(frozen=True, slots=True)
class HostRecord:
    """One host, as it describes itself."""

    place: str
    """Digest of the place of its arenas: 16 hex digits."""
    host: str
    """Name, for display."""
    domain: str
    """Failure domain: the given one, or the host's machine; "" if the host is its own domain."""
    address: str
    """IP address of its daemon."""
    port: int
    tls: bool
    """Whether its daemon requires TLS."""
    written: int
    """Seconds since the epoch, by the host's own clock."""
    to: tuple[str, ...] = ()
    """Places of the hosts to which it sends its copies."""

    @property
    def data(self) -> bytes:
        """The file's content."""
        return dump_json({"format": FORMAT, "kind": "host", **asdict(self)})

    @staticmethod
    def parse(data: bytes, what: object, *, place: str) -> HostRecord:
        """Parse a record from its file's bytes, and check every field. Raises Corruption, naming `what`."""
        f = Fields(load_json(data, what, containers=8, values=1024), what)
        if f.text("kind") != "host" or f.hex("place", 16) != place:
            raise corrupt(what, "it is the record of another host")
        host, domain, address = (f.text(name) for name in ("host", "domain", "address"))
        if max(map(len, (host, domain, address))) > MOST_TEXT:
            raise corrupt(what, "a name in it is too long")
        try:
            found = ip_address(address.partition("%")[0])
        except ValueError:
            raise corrupt(what, "it has no IP address") from None
        if found.is_unspecified or found.is_multicast:
            raise corrupt(what, "its address is not that of one host")  # the first would be the reader's own
        to = f.raw("to")
        if not isinstance(to, list) or len(to) > _MOST_TO or not all(is_hex(one, 16) for one in to):
            raise corrupt(what, "its hosts are malformed")
        return HostRecord(
            place,
            printable(host),
            domain,
            address,
            f.integer("port", 1, 65_535),
            f.flag("tls"),
            f.integer("written", 0, _MOST_TIME),
            tuple(to),
        )

    def age(self, now: float) -> float:
        """Return the seconds between the record and `now`. Clocks differ, so a record of the future has an age, too."""
        return abs(now - self.written)

    def fresh(self, now: float) -> bool:
        """Return whether the host has written the record lately."""
        return self.age(now) <= STALE


def host_path(place: str) -> str:
    """Return the path of a host's record."""
    return f"{HOSTS}/{place}.json"


def write_host(store: Store, record: HostRecord) -> None:
    """Write a host's record, in place of the one before. The folder exists: see `Blobs.prepare`.

    Raises AccessDenied, Unavailable, Corruption.
    """
    store.blobs.replace(host_path(record.place), record.data)


def host_marks(store: Store) -> dict[str, str]:
    """Return by place a mark of each record, which changes with the record; "" if it is not known whether it changes.

    At most `MOST_HOSTS` are returned. Raises AccessDenied, Unavailable, Corruption.
    """
    found = {match[1]: mark for name, mark in store.blobs.marks(HOSTS) if (match := _NAME.fullmatch(name))}
    if len(found) > MOST_HOSTS:
        log.warning("%s: %d hosts are recorded; %d are read", store.url, len(found), MOST_HOSTS)
    return dict(sorted(found.items())[:MOST_HOSTS])


def read_host(store: Store, place: str) -> HostRecord | None:
    """Return the record of a host; None if it is gone, damaged or of a newer version, which is logged at INFO.

    Raises AccessDenied, Unavailable.
    """
    path = host_path(place)
    try:
        return HostRecord.parse(store.blobs.read(path, MAX_HOST), store.blobs.where(path), place=place)
    except FileNotFoundError:
        return None
    except Corruption as error:
        log.info("%s: the record of a host is ignored: %s", store.url, error.message)
        return None


def read_hosts(store: Store) -> dict[str, HostRecord]:
    """Return all hosts' records, by place. Raises AccessDenied, Unavailable, Corruption."""
    places = list(host_marks(store))
    found = store.blobs.each(lambda place: read_host(store, place), places)
    return {record.place: record for record in found if record is not None}


def gone_hosts(records: Mapping[str, HostRecord], now: float, own: Collection[str] = ()) -> list[str]:
    """Return the places of hosts whose records differ from `now` by more than a day, and from a newer record, too.

    own: places whose records have the same clock as `now`, and confirm nothing. A new machine's clock may be wrong
    until it is set, and then makes no record old. The newest of the other records always stays.
    """
    newest = max((record.written for place, record in records.items() if place not in own), default=0)
    return [
        place
        for place, record in records.items()
        if record.age(now) > GONE and newest - record.written > GONE
    ]


def remove_hosts(store: Store, places: Iterable[str]) -> int:
    """Remove records, and return how many. A host that lives writes its own again. S3 does not tell which were absent.

    Raises AccessDenied, Unavailable, Corruption.
    """
    removed = 0
    for place in places:
        try:
            store.blobs.delete(host_path(place))
            removed += 1
        except FileNotFoundError:
            continue  # another process has removed it
    return removed
