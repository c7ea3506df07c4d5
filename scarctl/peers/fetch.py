"""Fetch a run's memory from other hosts' daemons, without a process group: the newest arena that belongs to the store.

The other side is `scarctl.peers.lender`. Between hosts of one job `scarctl.distributed.host_memory` does the same over
their group. All hosts are asked at once. Nothing that one of them sends, or does not send, costs more than a line in
the log: sizes and counts are bounded, all waiting is limited, and this host's own arena stays until another one is
complete here.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

from scarctl.arena.age import Age, age_of
from scarctl.arena.kinship import descends, view_of
from scarctl.arena.owner import Owner
from scarctl.arena.transfer import PIECE, Incoming
from scarctl.arena.view import ArenaView
from scarctl.errors import Corruption, ScarError
from scarctl.peers.channel import Channel, Gone
from scarctl.peers.connect import connected
from scarctl.peers.frames import MAX_BODY, Kind, Offer, decode_offer, encode, hex_of, text_of
from scarctl.peers.handshake import Hello
from scarctl.peers.lender import PIECE_SECONDS, seconds_for
from scarctl.peers.sender import Candidate
from scarctl.peers.tls import Tls
from scarctl.store import Store
from scarctl.util.worker import run_all

log = logging.getLogger("scarctl")

ANSWER_SECONDS = 3.0
"""Seconds for a host to be reached, to prove its identity, and to answer."""
_MOST_AT_ONCE = 32
"""Most hosts that are asked at the same time."""
_ALL_SECONDS = 30.0
"""Seconds in which one host is asked about runs, one after the other."""
_MOST_LINE = 1 << 10
"""Most bytes of an arena's line, which has 32."""


class Fetched(NamedTuple):
    """Memory that was brought from another host."""

    host: str
    """Name, for display."""
    bytes: int
    """Bytes of the arena's file that were sent."""


class Answer(NamedTuple):
    """What a host has of one run."""

    offer: Offer | None
    """Its arena, if it may be fetched."""
    alive: bool
    """Whether the run's process lives there."""


@dataclass(frozen=True, slots=True, repr=False)
class Asker:
    """Asks other hosts' daemons for memory. start, secret, tls: as for a sender (`scarctl.peers.sender.Source`)."""

    start: str
    secret: bytes
    tls: Tls | None
    seconds: float = ANSWER_SECONDS
    """Time for a host to be reached and to answer."""

    def connected(self, host: Candidate, run: str) -> AbstractContextManager[Channel]:
        """See `scarctl.peers.connect.connected`."""
        hello = Hello.new(self.start, run, 1)
        return connected(host.address, host.port, hello, self.secret, self.tls, seconds=self.seconds)

    def ask(self, host: Candidate, run: str) -> Answer | None:
        """Return what a host has of a run; None, with a line in the log, if it does not say."""
        try:
            with self.connected(host, run) as channel:
                channel.send(encode(Kind.INVENTORY, {}))
                head, body = channel.expect(Kind.INVENTORY, most_body=_MOST_LINE, strictly=True)
                return Answer(decode_offer(head, body), head.get("alive") is True)
        except (Gone, OSError) as error:
            _say(logging.INFO, run, host, error)
        except ScarError as error:
            _say(logging.INFO if error.kind == "unknown-start" else logging.WARNING, run, host, error)
        except Exception:
            log.exception("asking %s for memory failed unexpectedly", host.host)
        return None

    def ask_all(self, hosts: Sequence[Candidate], runs: Sequence[str]) -> list[tuple[int, int, Answer]]:
        """Return the numbers of the hosts and runs of which a host has an arena, or the live process, with its answer.

        Hosts are asked at once. One that does not answer about a run is not asked about the next ones.
        """
        found: list[tuple[int, int, Answer]] = []

        def ask(number: int) -> None:
            until = time.monotonic() + _ALL_SECONDS
            for at, run in enumerate(runs):
                answer = self.ask(hosts[number], run)
                if answer is None or time.monotonic() > until:
                    return
                if answer.alive or answer.offer is not None:
                    found.append((number, at, answer))

        run_all(ask, range(len(hosts)), _MOST_AT_ONCE)
        return sorted(found, key=lambda one: one[:2])


def fetch_memory(
    view: Store,
    base: str | None,
    hosts: Sequence[Candidate],
    asker: Asker,
    *,
    than: Age | None = None,
) -> Fetched | None:
    """Bring the newest arena of the view's run from other hosts to this host, if it is newer than this host's.

    than: age of an arena that this host can have otherwise; only a newer one is brought.

    view: the run's own view of the store (`Store.of_shard`). base: `arena_dir`, see `arena_folder`.
    hosts: daemons to ask. A transfer takes as long as it progresses.

    Return the host that it came from, and its bytes; None if nothing was brought. An arena that was here is set aside
    once the new one is complete, verified, and in its place as a replica of that host's. The other host keeps its own.
    If a host cannot be used, or there is no room, a line in the log says so. The same if the run's process lives on
    another host, and the store has a lock, which that process has: the run cannot start here.

    Call it before the run's arena is opened here. Raises Unavailable, AccessDenied, Corruption if the store cannot be
    read: without it no memory is believed.
    """
    here = view_of(base, view)
    if here is not None and here.alive:
        return None  # its process would be in the way of this one's session, too
    own = max((age for age in (age_of(here), than) if age is not None), default=None)
    fetch = _Fetch(view, base, own, asker)
    offers = fetch.offers(hosts)
    if fetch.alive_on and view.address.root is not None:
        # It has the store's lock. A copy of its memory would be taken from it, and its process would lose the link.
        log.warning("%s: its process lives on %s, so no memory is fetched", view.url, fetch.alive_on)
        return None
    for host, offer in offers:
        try:
            if fetch.is_wanted(offer):
                return fetch.bring(host)
        except (ScarError, Gone, OSError) as error:
            log.warning("%s: memory on %s is not used: %s", view.url, host.host, error)
        except Exception:
            log.exception("%s: fetching memory from %s failed unexpectedly", view.url, host.host)
    return None


class _Fetch:
    """One call of `fetch_memory`. own: age of the newest arena that this host has without it; None without one."""

    def __init__(self, view: Store, base: str | None, own: Age | None, asker: Asker) -> None:
        self._view, self._base, self._own, self._asker = view, base, own, asker
        self.alive_on = ""
        """Name of a host on which the run's process lives."""

    def offers(self, hosts: Sequence[Candidate]) -> list[tuple[Candidate, Offer]]:
        """Return the hosts whose arena is newer than this one's, with what they offer, the newest first."""
        found: list[tuple[Candidate, Offer]] = []

        def ask(host: Candidate) -> None:
            answer = self._asker.ask(host, self._view.run_id)
            if answer is None:
                return
            if answer.alive:
                self.alive_on = host.host
            if answer.offer is not None and (self._own is None or answer.offer.age > self._own):
                found.append((host, answer.offer))

        each = list(dict.fromkeys(hosts))
        run_all(ask, each, _MOST_AT_ONCE)
        return sorted(found, key=lambda one: (one[1].age, -each.index(one[0])), reverse=True)

    def is_wanted(self, offer: Offer) -> bool:
        """Return whether an arena is newer than this host's, and of the store. Logs a warning if it is of another.

        Raises as reading the store does.
        """
        if self._own is not None and offer.age <= self._own:
            return False
        if descends(offer.line, self._view):
            return True
        log.warning(
            "%s: memory on another host, of step %d, no longer belongs to this store, and is not fetched",
            self._view.url,
            offer.age[1],
        )
        return False

    def bring(self, host: Candidate) -> Fetched | None:
        """Fetch one host's arena; None if it is no longer wanted. Raises ScarError, Gone, OSError."""
        with contextlib.ExitStack() as closing:
            channel = closing.enter_context(self._asker.connected(host, self._view.run_id))
            channel.within(PIECE_SECONDS)
            channel.send(encode(Kind.FETCH, {}))
            offer = decode_offer(*channel.expect(Kind.FETCH, most_body=_MOST_LINE, strictly=True))
            if offer is None or not self.is_wanted(offer):
                return None
            if offer.withheld:
                log.warning(
                    "%s: the extras on %s are too large to be sent, and are missing here",
                    self._view.url,
                    host.host,
                )
            incoming = Incoming(self._view, self._base, offer.size, offer.files_size, offer.gap)
            closing.callback(incoming.close)
            digest = _receive(channel, incoming, offer)
            # An arena of another host: the store may have newer records of its epoch than its line says.
            owner = Owner(host.host, "", offer.epoch)
            incoming.install(digest, owner, lambda arrived: _require_same(arrived, offer))
            incoming.close()  # before the other host lets go
            log.info("%s: fetched %d bytes of memory from %s", self._view.url, offer.size, host.host)
            _let_go(channel, host)
            return Fetched(host.host, offer.size)


def _say(level: int, run: str, host: Candidate, error: Exception) -> None:
    log.log(level, "%s: %s offers no memory of it: %s", run, host.host, error)


def _receive(channel: Channel, incoming: Incoming, offer: Offer) -> str:
    """Receive all bytes of an arena, and return their digest according to the sender. Raises Corruption, Gone."""
    channel.within(PIECE_SECONDS)
    channel.send(encode(Kind.ACK, {}))
    for _ in range(offer.files):
        channel.within(seconds_for(min(MAX_BODY, offer.files_size), offer.rate))
        head, body = channel.expect(Kind.FILE, most_body=min(MAX_BODY, offer.files_size), strictly=True)
        incoming.keep(text_of(head, "name", 100), body)
    for at in range(0, offer.size, PIECE):
        size = min(PIECE, offer.size - at)
        channel.within(seconds_for(size, offer.rate))
        _, body = channel.expect(Kind.PIECE, most_body=size, strictly=True)
        if body.size != size:
            raise Corruption(f"a piece has {body.size} bytes, not {size}")
        incoming.write(at, body)
    head, _ = channel.expect(Kind.END, most_body=0, strictly=True)
    return hex_of(head, "digest", 32)


def _require_same(arrived: ArenaView, offer: Offer) -> None:
    """Raise Corruption unless the arena that has arrived is the one that was offered."""
    if (age_of(arrived), arrived.epoch, arrived.line) != (offer.age, offer.epoch, offer.line):
        raise Corruption("the arena is not the one that was offered", hint="the store is not affected")


def _let_go(channel: Channel, host: Candidate) -> None:
    """Say that the arena is here, and wait until the other host no longer saves the run."""
    try:
        channel.within(PIECE_SECONDS)
        channel.send(encode(Kind.ACK, {}))
        channel.expect(Kind.ACK, most_body=0, strictly=True)
    except (Gone, ScarError) as error:
        log.warning("%s may still save the run whose memory was fetched from it: %s", host.host, error)
