"""Fetch a run's memory from other hosts' daemons, without a process group: the newest arena that belongs to the store.

The other side is `scarctl.peers.lender`. `scarctl.distributed.host_memory` does the same for ranks, over their group.
All hosts are asked at once. Nothing that one of them sends, or does not send, costs more than a line in the log: sizes
and counts are bounded, all waiting is limited, and this host's own arena stays until another one is complete here.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
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
_MOST_LINES = 1 << 20
"""Most bytes of an arena's lines. A rank or member has 24."""


class Fetched(NamedTuple):
    """Memory that was brought from another host."""

    host: str
    """Name, for display."""
    bytes: int
    """Bytes of the arena's file."""


def fetch_memory(
    view: Store,
    base: str | None,
    hosts: Sequence[Candidate],
    start: str,
    secret: bytes,
    tls: Tls | None,
    *,
    seconds: float = ANSWER_SECONDS,
) -> Fetched | None:
    """Bring the newest arena of the view's run from other hosts to this host, if it is newer than this host's.

    view: the run's own view of the store (`Store.of_shard`). base: `arena_dir`, see `arena_folder`.
    hosts: daemons to ask. start, secret, tls: as for a sender (`scarctl.peers.sender.Source`).
    seconds: time for each host to be reached and to answer. A transfer takes as long as it progresses.

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
    own = age_of(here)
    fetch = _Fetch(view, base, own, start, secret, tls, seconds)
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
    """One call of `fetch_memory`. own: age of this host's arena; None without one."""

    def __init__(
        self,
        view: Store,
        base: str | None,
        own: Age | None,
        start: str,
        secret: bytes,
        tls: Tls | None,
        seconds: float,
    ) -> None:
        self._view, self._base, self._own = view, base, own
        self._start, self._secret, self._tls, self._seconds = start, secret, tls, seconds
        self.alive_on = ""
        """Name of a host on which the run's process lives."""

    def offers(self, hosts: Sequence[Candidate]) -> list[tuple[Candidate, Offer]]:
        """Return the hosts whose arena is newer than this one's, with what they offer, the newest first."""
        found: list[tuple[Candidate, Offer]] = []

        def ask(host: Candidate) -> None:
            offer = self._ask(host)
            if offer is not None and (self._own is None or offer.age > self._own):
                found.append((host, offer))

        each = list(dict.fromkeys(hosts))
        run_all(ask, each, _MOST_AT_ONCE)
        return sorted(found, key=lambda one: (one[1].age, -each.index(one[0])), reverse=True)

    def is_wanted(self, offer: Offer) -> bool:
        """Return whether an arena is newer than this host's, and of the store. Logs a warning if it is of another.

        Raises as reading the store does.
        """
        if self._own is not None and offer.age <= self._own:
            return False
        if descends(offer.lines, offer.epoch, self._view):
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
            channel = closing.enter_context(self._connected(host))
            channel.within(PIECE_SECONDS)
            channel.send(encode(Kind.FETCH, {}))
            offer = decode_offer(*channel.expect(Kind.FETCH, most_body=_MOST_LINES, strictly=True))
            if offer is None or not self.is_wanted(offer):
                return None
            if offer.withheld:
                log.warning(
                    "%s: %d hand-overs on %s are too large to be sent: their extras are missing here",
                    self._view.url,
                    offer.withheld,
                    host.host,
                )
            incoming = Incoming(self._view, self._base, offer.size, offer.files_size)
            closing.callback(incoming.close)
            digest = _receive(channel, incoming, offer)
            # An arena of another host: the store may have newer records of its epoch than its lines say.
            owner = Owner(host.host, "", offer.epoch)
            incoming.install(digest, owner, lambda arrived: _require_same(arrived, offer))
            incoming.close()  # before the other host lets go
            log.info("%s: fetched %d bytes of memory from %s", self._view.url, offer.size, host.host)
            _let_go(channel, host)
            return Fetched(host.host, offer.size)

    def _ask(self, host: Candidate) -> Offer | None:
        try:
            with self._connected(host) as channel:
                channel.send(encode(Kind.INVENTORY, {}))
                head, body = channel.expect(Kind.INVENTORY, most_body=_MOST_LINES, strictly=True)
                if head.get("alive") is True:
                    self.alive_on = host.host
                return decode_offer(head, body)
        except (Gone, OSError) as error:
            self._say(logging.INFO, host, error)
        except ScarError as error:
            self._say(logging.INFO if error.kind == "unknown-start" else logging.WARNING, host, error)
        except Exception:
            log.exception("asking %s for memory failed unexpectedly", host.host)
        return None

    def _say(self, level: int, host: Candidate, error: Exception) -> None:
        log.log(level, "%s: %s offers no memory of it: %s", self._view.run_id, host.host, error)

    def _connected(self, host: Candidate) -> AbstractContextManager[Channel]:
        hello = Hello.new(self._start, self._view.run_id, 1)
        return connected(host.address, host.port, hello, self._secret, self._tls, seconds=self._seconds)


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
    if (age_of(arrived), arrived.epoch, arrived.lines) != (offer.age, offer.epoch, offer.lines):
        raise Corruption("the arena is not the one that was offered", hint="the store is not affected")


def _let_go(channel: Channel, host: Candidate) -> None:
    """Say that the arena is here, and wait until the other host no longer saves the run."""
    try:
        channel.within(PIECE_SECONDS)
        channel.send(encode(Kind.ACK, {}))
        channel.expect(Kind.ACK, most_body=0, strictly=True)
    except (Gone, ScarError) as error:
        log.warning("%s may still save the run whose memory was fetched from it: %s", host.host, error)
