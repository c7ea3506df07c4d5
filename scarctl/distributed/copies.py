"""Have daemons of other hosts keep copies of each rank's memory: agree on a secret, addresses, and places of copies.

With the secret in a file, each host also has a record in the store, so that a start on other hosts finds it
(`scarctl.distributed.memory_search`). A secret that was drawn ends with its start, and no later one can use it.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from scarctl.config import SessionSettings
from scarctl.daemon.saver import DaemonSaver
from scarctl.distributed.collectives import Team
from scarctl.distributed.credentials import Credentials, tls_files
from scarctl.distributed.host_address import (
    NEAR,
    NO_COPY,
    address_among,
    digest_of_place,
    domain_of,
    is_local,
    is_near,
    name_of,
    place_of,
    reaching,
)
from scarctl.distributed.presence import COPIES, Presence
from scarctl.errors import ScarError
from scarctl.peers.handshake import SECRET_BYTES
from scarctl.peers.placement import place
from scarctl.persist.saver import Saver
from scarctl.state.caveats import Caveats
from scarctl.store import Store
from scarctl.util.text import counted


@dataclass(frozen=True, slots=True)
class Location:
    """A rank's facts about its host: the place of arenas, the failure domain, and the daemon's address."""

    place: str
    host: str
    """Name, for display."""
    domain: str
    address: str
    port: int
    """Port of the daemon; 0: it keeps no copies."""


def keep_copies(
    store: Store,
    saver: Saver,
    settings: SessionSettings,
    team: Team,
    start: str,
    credentials: Credentials | None,
    caveats: Caveats,
) -> Presence | None:
    """Have `settings.peers` other hosts keep copies of this rank's memory. A collective.

    start: name of this start of the job. credentials: those of all ranks; None: a secret is drawn.

    Return what keeps this host's record, to `start` and `close` it: on the first rank of each host with a secret's
    file, otherwise None. A copy that cannot be kept becomes a caveat: training continues without it.

    Raises Unavailable if a rank is gone.
    """
    if credentials is None:
        drawn = team.from_rank(0, secrets.token_hex(SECRET_BYTES))
        credentials = Credentials(start, drawn, tls_files(settings), lasting=False)
    address = _address(settings, team)
    port = _admit(saver, credentials, address, settings.peer_bandwidth, caveats)
    mine = [place_of(settings), name_of(settings), domain_of(settings), address, port]
    members = [Location(*fields) for fields in team.gather(mine)]
    hosts = _hosts(members)
    own = [host.place for host in hosts].index(members[team.rank].place)
    chosen = place([host.domain for host in hosts], settings.peers)[own]
    _say_missing(hosts, settings, caveats)
    keepers = [hosts[n] for n in chosen[: settings.peers]]
    if keepers and all(is_near(host.domain, host.address) for host in keepers):
        caveats.say("peer-machine", NEAR)
    if not port or not isinstance(saver, DaemonSaver):
        return None
    peers = [
        {"host": host.host, "address": host.address, "port": host.port}
        for host in (hosts[n] for n in chosen)
        if host.port
    ]
    saver.follow(hosts[own].host, peers, settings.peers, settings.peer_bandwidth, start)
    if not credentials.lasting or [one.place for one in members].index(hosts[own].place) != team.rank:
        return None
    keeping = tuple(digest_of_place(host.place) for host in keepers)
    return Presence(store, saver, settings, credentials, caveats, address, keeping)


def _admit(saver: Saver, credentials: Credentials, address: str, rate: float | None, caveats: Caveats) -> int:
    """Return the port at which this host's daemon takes copies; 0 if it cannot."""
    why = "there is no daemon"
    if isinstance(saver, DaemonSaver):
        try:
            return saver.admit(
                credentials.start, credentials.secret, address, credentials.files, rate, credentials.lasting
            )
        except ScarError as error:
            why = str(error)
    caveats.say(COPIES, f"{NO_COPY}: {why}")
    return 0


def _say_missing(hosts: Sequence[Location], settings: SessionSettings, caveats: Caveats) -> None:
    there = sum(bool(host.port) for host in hosts)
    if there <= settings.peers:
        found = "it is on no other host" if there < 2 else f"it is on {there - 1} other hosts"
        caveats.say(
            COPIES,
            f"peers={settings.peers}, but only {counted(there, 'host')} can keep copies of memory: {found}",
        )


def _hosts(members: Sequence[Location]) -> list[Location]:
    """Return each host's facts from its first rank."""
    found: dict[str, Location] = {}
    for member in members:
        found.setdefault(member.place, member)
    return list(found.values())


def _address(settings: SessionSettings, team: Team) -> str:
    """Return the address given for this host. Without one: the address of this host that reaches the master; on the
    master's host, the one that reaches others. On different machines that all have a local one: see `address_among`.
    """
    given, name = settings.peer_address, socket.gethostname()
    own = given or reaching(os.environ.get("MASTER_ADDR") or name)
    known = team.gather([own, name])
    if given is not None or not is_local(own):
        return own
    others = [address for address, _ in known if not is_local(address)]
    if others:
        return reaching(others[0])
    # Without MASTER_ADDR: Debian's hosts know their own names as 127.0.1.1.
    return own if all(other == name for _, other in known) else address_among(())
