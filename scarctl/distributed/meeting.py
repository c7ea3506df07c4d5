"""Meet other hosts through the store: write this host's record, read theirs, and choose who keeps copies of a member's
memory.

Members start and end at any time, and no group connects them. So a thread of each session looks at the records again
and again. It asks for other copies only if the choice has changed (`scarctl.peers.placement.choose`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from scarctl.config import SessionSettings
from scarctl.daemon.saver import DaemonSaver
from scarctl.distributed.credentials import Credentials, disk_of
from scarctl.distributed.host_address import (
    NEAR,
    address_among,
    is_elsewhere,
    is_local,
    is_near,
    name_of,
)
from scarctl.distributed.presence import COPIES, Presence, jittered
from scarctl.errors import ScarError
from scarctl.peers.link import CONNECTED, REPLACED_AFTER, State
from scarctl.peers.placement import Site, choose
from scarctl.peers.sender import Candidate
from scarctl.state.caveats import Caveats
from scarctl.store import Store
from scarctl.store.hosts import HostRecord
from scarctl.util.text import counted

log = logging.getLogger("scarctl")

_FIRST = 1.5
"""Seconds between a host's first record and its first choice: hosts that start together find each other."""
_LACKING, _USUAL = 15.0, 60.0
"""Seconds between two looks at the records while copies are lacking, and otherwise."""
_GROWTH = 2.0
"""Factor by which the first pauses grow, up to `_LACKING`."""
_ALONE = 60.0
"""Seconds without enough hosts, or links to them, after which a warning says so."""
_TRIED = 10.0
"""Seconds for which a host that was never connected is tried, before others are. It has nothing that would be lost."""
_FAILED = 600.0
"""Seconds for which a host that could not be reached is asked last."""
_MOST = 128
"""Most candidates that the daemon gets."""
_ADDRESS, _MACHINE = "peer-address", "peer-machine"
"""Kinds of the caveats: this host cannot be reached; all copies are on this machine."""


@dataclass(frozen=True, slots=True)
class _Linked:
    """A connected host."""

    place: str
    """Its place, "" if its record has changed."""
    complete: bool
    """Whether it has a complete copy."""
    near: bool = False
    """Whether it is a container of this machine."""


class Meeting(Presence):
    """Keeps the copies of one session's memory on other hosts. Made after its saver is open; `start` it, `close` it."""

    def __init__(
        self,
        store: Store,
        saver: DaemonSaver,
        settings: SessionSettings,
        credentials: Credentials,
        process: str,
        caveats: Caveats,
        *,
        clock: Callable[[], float] = time.time,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare, without a request. process: name of the training process's start. clock, now: see `KnownHosts`."""
        super().__init__(store, saver, settings, credentials, caveats, clock=clock, now=now)
        self._disk = disk_of(store)
        self._process = process
        self._looked = False
        self._asked: list[Candidate] | None = None
        """The candidates that the daemon has, best first."""
        self._asked_at = 0.0
        self._links: list[_Linked] = []
        self._idle = self._fenced = False
        """Whether the daemon has no link; whether this run has continued elsewhere."""
        self._met: set[str] = set()
        """Places of hosts that have been connected."""
        self._missing: dict[str, float] = {}
        """By place: time since which a chosen host has not been connected."""
        self._pause = _FIRST
        self._lacking, self._lacking_since = "", 0.0
        """Why copies are lacking: "hosts", "links", or "" if they are not; and since when."""

    def look(self) -> float:
        """Look at the records once, and act on them. Return the seconds until the next look."""
        self._look_at_links()
        lacking = self._complete < self._settings.peers
        near = {self._place, *self._chosen}
        seen = True
        try:
            self._hosts.read(near, self._connected, all_of_them=lacking)
        except ScarError as error:
            seen = False
            log.info("%s: the records of hosts cannot be read: %s", self._url, error)
        if not self._listen():
            return self._soon()
        own, first, self._looked = self._hosts.own, not self._looked, True
        if first and seen and (own is None or not own.fresh(self._clock())):
            self._write()
            return jittered(_FIRST)
        try:
            self._choose()
        except ScarError as error:
            log.info("%s: copies on other hosts could not be changed: %s", self._url, error)
        self._write()
        if self._complete < self._settings.peers:
            return self._soon()
        self._pause = _FIRST
        return jittered(_USUAL)

    def _soon(self) -> float:
        pause, self._pause = self._pause, min(_LACKING, self._pause * _GROWTH)
        return jittered(pause)

    # -- this host ----------------------------------------------------------------------------------------------

    def _listen(self) -> bool:
        """Have this host's daemon listen, and learn its port. Return whether it does."""
        now = self._clock()
        # In the same order for all members of this host: one record has the address.
        others = [one for _, one in sorted(self._others().items()) if one.fresh(now)]
        address = self._settings.peer_address or address_among(one.address for one in others)
        if address != self._address and ip_address(address.partition("%")[0]).is_global:
            log.warning(
                "the daemon listens for other hosts at %s, an address of the internet: set peer_address to one of a "
                "private network",
                address,
            )
        if not self._listen_at(address):
            return False
        away = sorted(one.host for one in others if is_elsewhere(one.host))
        if away and is_local(address) and self._settings.peer_address is None:
            self._say(
                _ADDRESS,
                f"the daemon listens at {address}, which {away[0]} cannot reach, because no other address of this host "
                "was found: set peer_address (SCARCTL_PEER_ADDRESS) on each host to one that the others reach",
            )
        else:
            self._caveats.withdraw(_ADDRESS)
        return True

    # -- other hosts --------------------------------------------------------------------------------------------

    def _others(self) -> dict[str, HostRecord]:
        """Return the records of other hosts, by place, that this one may reach."""
        mine = self._address, self._port
        return {
            place: one
            for place, one in self._hosts.records.items()
            if place != self._place
            and (one.address, one.port) != mine
            # A local address of another machine would be one of this machine here.
            and (not is_local(one.address) or not self._address or is_local(self._address))
        }

    def _look_at_links(self) -> None:
        """Learn from the daemon which hosts are connected. While it is replaced by another one, none are known."""
        try:
            links = self._saver.links()
        except ScarError as error:
            log.debug("the daemon does not report its links: %s", error)
            links = []
        records = {(one.address, one.port): one for one in self._hosts.records.values()}
        self._idle = not links
        self._fenced = any(link["state"] == State.FENCED.value for link in links)
        self._links = []
        for link in links:
            if State(link["state"]) in CONNECTED:
                record = records.get((link["address"], link["port"]))
                place, domain = ("", "") if record is None else (record.place, record.domain)
                self._links.append(_Linked(place, link["complete"] is True, is_near(domain, link["address"])))

    @property
    def _complete(self) -> int:
        """Number of connected hosts with a complete copy."""
        return sum(link.complete for link in self._links)

    @property
    def _connected(self) -> list[str]:
        """Places of connected hosts, those with complete copies first."""
        return [link.place for link in sorted(self._links, key=lambda link: not link.complete) if link.place]

    def _choose(self) -> None:
        """Choose hosts, and ask for copies there if the choice has changed. Raises ScarError."""
        self._look_at_links()
        if self._fenced:
            self._say(
                COPIES,
                "another host no longer keeps copies of this host's memory: according to it, this member has continued "
                "elsewhere",
            )
            return
        copies, records, own = self._settings.peers, self._others(), self._hosts.own
        connected = [place for place in self._connected if place in records]
        wall = self._clock()
        places = choose(
            Site(
                self._place,
                self._domain,
                self._chosen or (() if own is None else own.to),
            ),
            [Site(place, one.domain, one.to, one.fresh(wall)) for place, one in records.items()],
            copies,
            kept=connected,
            failing=self._failing(connected, records),
        )[:_MOST]
        candidates = [Candidate(records[p].host, records[p].address, records[p].port) for p in places]
        if self._should_ask(candidates):
            self._ask(candidates)
        self._chosen = tuple(places[:copies])
        for place in self._chosen:
            self._missing.setdefault(place, self._now())  # until it is seen to be connected
        self._report(len(candidates))

    def _failing(self, connected: Collection[str], records: Mapping[str, HostRecord]) -> set[str]:
        """Return the places that were asked for some time without a connection, and those that use TLS differently."""
        now, missing = self._now(), self._missing
        self._met.update(connected)
        for place, since in list(missing.items()):
            if place in connected or place not in records or now > since + REPLACED_AFTER + _FAILED:
                del missing[place]
        own = self._credentials.files is not None
        return {place for place, one in records.items() if one.tls != own} | {
            place
            for place, since in missing.items()
            if now > since + (REPLACED_AFTER if place in self._met else _TRIED)
        }

    def _should_ask(self, candidates: Sequence[Candidate]) -> bool:
        """Return whether the daemon needs other candidates than it has."""
        if self._asked is None:
            return True
        copies = self._settings.peers
        if set(candidates[:copies]) != set(self._asked[:copies]) or (self._idle and candidates):
            return True
        # For a new reserve alone the daemon leaves complete copies as they are. While a copy is incomplete, a request
        # would begin its link again: that waits until those before have failed.
        late = self._now() > self._asked_at + REPLACED_AFTER
        return (late or self._complete >= copies) and not set(candidates) <= set(self._asked)

    def _ask(self, candidates: Sequence[Candidate]) -> None:
        self._saver.follow(
            name_of(self._settings),
            [{"host": one.host, "address": one.address, "port": one.port} for one in candidates],
            self._settings.peers,
            self._settings.peer_bandwidth,
            self._process,
        )
        self._asked, self._asked_at = list(candidates), self._now()
        names = ", ".join(one.host for one in candidates[: self._settings.peers])
        log.info("%s: copies of this host's memory: %s", self._url, names or "no host yet")

    def _report(self, hosts: int) -> None:
        """Say after a minute that hosts are too few, or do not keep copies. Withdraw it once the first is complete.

        hosts: number of those that may keep copies.
        """
        copies, linked = self._settings.peers, len(self._links)
        self._report_machine()
        few, why = hosts < copies, ""
        if few:
            there = f"only {counted(hosts, 'other host')} can" if hosts else "no other host can yet"
            why = f"{there} keep copies of this host's memory"
        elif linked < copies:
            there = f"only {linked}" if linked else "none"
            others = counted(hosts, "other host")
            why = f"of {others} {there} keeps a copy of this host's memory: no answer, or a refusal"
        elif self._complete:
            self._caveats.withdraw(COPIES)
        if why and self._disk:
            why += (
                f". The store is on a disk of this machine ({self._disk}): hosts of other machines are not met. If "
                "they mount it from here, mount it here in the same way"
            )
        lacking = "" if not why else "hosts" if few else "links"
        if lacking != self._lacking:
            self._lacking, self._lacking_since = lacking, self._now()
        if why and self._now() >= self._lacking_since + _ALONE:
            self._say(COPIES, f"peers={copies}, but {why}")

    def _report_machine(self) -> None:
        if self._links and all(link.near for link in self._links):
            self._say(_MACHINE, NEAR)
        elif self._links:
            self._caveats.withdraw(_MACHINE)
