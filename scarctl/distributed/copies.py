"""Have daemons of other hosts keep copies of each rank's memory: agree on a secret, addresses, and places of copies."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from scarctl.config import SessionSettings
from scarctl.daemon.saver import DaemonSaver
from scarctl.distributed.collectives import Team
from scarctl.distributed.host_address import NEAR, domain_of, is_local, is_near, name_of, place_of, reaching
from scarctl.errors import ScarError, UsageError
from scarctl.peers.handshake import SECRET_BYTES
from scarctl.peers.placement import place
from scarctl.peers.secret import fingerprint, read_secret, secret_of_start
from scarctl.peers.tls import Tls
from scarctl.persist.saver import Saver
from scarctl.state.caveats import Caveats

_KIND = "peers"


@dataclass(frozen=True, slots=True)
class Member:
    """A rank's facts about its host: the place of arenas, the failure domain, and the daemon's address."""

    place: str
    host: str
    """Name, for display."""
    domain: str
    address: str
    port: int
    """Port of the daemon; 0: it keeps no copies."""


def keep_copies(saver: Saver, settings: SessionSettings, team: Team, start: str, caveats: Caveats) -> None:
    """Have `settings.peers` other hosts keep copies of this rank's memory. A collective.

    A copy that cannot be kept becomes a caveat: training continues without it. Raises Unavailable if a rank is gone.
    """
    secret = _secret(settings, team, start)
    address = _address(settings, team)
    files = None if settings.peer_tls is None else [os.path.abspath(path) for path in settings.peer_tls]
    port = _admit(saver, start, secret, address, files, settings.peer_bandwidth, caveats)
    mine = [place_of(settings), name_of(settings), domain_of(settings), address, port]
    members = [Member(*fields) for fields in team.gather(mine)]
    hosts = _hosts(members)
    own = [host.place for host in hosts].index(members[team.rank].place)
    chosen = place([host.domain for host in hosts], settings.peers)[own]
    _say_missing(hosts, settings, caveats)
    keepers = [hosts[n] for n in chosen[: settings.peers]]
    if keepers and all(is_near(host.domain, host.address) for host in keepers):
        caveats.say("peer-machine", NEAR, inexact=False)
    if not port or not isinstance(saver, DaemonSaver):
        return
    peers = [
        {"host": host.host, "address": host.address, "port": host.port}
        for host in (hosts[n] for n in chosen)
        if host.port
    ]
    saver.follow(hosts[own].host, peers, settings.peers, settings.peer_bandwidth)


def check_files(settings: SessionSettings) -> None:
    """Read the files of `peer_tls` and `peer_secret_file`, before anything depends on them.

    Raises UsageError, AccessDenied for an unusable file.
    """
    if settings.peers and settings.peer_tls is not None:
        Tls([os.path.abspath(path) for path in settings.peer_tls])
    if settings.peers and settings.peer_secret_file is not None:
        read_secret(os.path.abspath(settings.peer_secret_file))


def _secret(settings: SessionSettings, team: Team, start: str) -> str:
    """Return the secret of this start in hex digits: from the file, or drawn by rank 0. A collective.

    Raises UsageError on all ranks if their secrets differ.
    """
    path = settings.peer_secret_file
    own = None if path is None else secret_of_start(read_secret(os.path.abspath(path)), start)
    known = team.gather(None if own is None else fingerprint(own))
    if any(other != known[0] for other in known):
        others = [rank for rank, other in enumerate(known) if other != known[0]]
        raise UsageError(
            f"peer_secret_file is not the same on all ranks: rank {others[0]} has another one than rank 0",
            hint="put the same file on all hosts, or give none",
            kind="peer-secret",
        )
    drawn: str = team.from_rank(0, "" if own else secrets.token_hex(SECRET_BYTES))
    return own or drawn


def _admit(
    saver: Saver,
    start: str,
    secret: str,
    address: str,
    files: list[str] | None,
    rate: float | None,
    caveats: Caveats,
) -> int:
    """Return the port at which this host's daemon takes copies; 0 if it cannot."""
    why = "there is no daemon"
    if isinstance(saver, DaemonSaver):
        try:
            return saver.admit(start, secret, address, files, rate)
        except ScarError as error:
            why = str(error)
    caveats.say(
        _KIND, f"this host's memory has no copy on another host, and keeps none: {why}", inexact=False
    )
    return 0


def _say_missing(hosts: Sequence[Member], settings: SessionSettings, caveats: Caveats) -> None:
    there = sum(bool(host.port) for host in hosts)
    if there <= settings.peers:
        found = "it is on no other host" if there < 2 else f"it is on {there - 1} other hosts"
        caveats.say(
            _KIND,
            f"peers={settings.peers}, but only {there} hosts can keep copies of memory: {found}",
            inexact=False,
        )


def _hosts(members: Sequence[Member]) -> list[Member]:
    """Return each host's facts from its first rank."""
    found: dict[str, Member] = {}
    for member in members:
        found.setdefault(member.place, member)
    return list(found.values())


def _address(settings: SessionSettings, team: Team) -> str:
    """Return the address given for this host. Without one: the address of this host that reaches the master; on the
    master's host, the one that reaches others.
    """
    given = settings.peer_address
    own = given or reaching(os.environ.get("MASTER_ADDR") or socket.gethostname())
    others = [address for address in team.gather(own) if not is_local(address)]
    return reaching(others[0]) if is_local(own) and others and given is None else own
