"""Send one run's arena to a peer, in a thread of the daemon: connect, prove, follow; reconnect when the link is
lost."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from scarctl.arena.arena import Arena
from scarctl.errors import Fenced, ScarError
from scarctl.peers.channel import Channel, Gone, readable
from scarctl.peers.connect import connected
from scarctl.peers.follower import BATCH_BYTES, Counters, Follower
from scarctl.peers.frames import Kind, encode
from scarctl.peers.handshake import Hello
from scarctl.peers.link import CONNECTED, REPLACED_AFTER, Link, State
from scarctl.peers.tls import Tls
from scarctl.state.version import NEVER
from scarctl.util.arrays import Bytes, Ids
from scarctl.util.niceness import be_polite

log = logging.getLogger("scarctl")

_WINDOW = 4
"""Most frames that are sent before the first of them is acknowledged."""
_LEAST_BATCH = 64 << 10
_PAUSE = 0.05
"""Least seconds between two rounds."""
_LOOK_SECONDS = 1.0
"""Seconds after which changes that no counter shows are found."""
_SIGN_SECONDS = 600.0
"""Seconds after which a mark shows that the owner lives: replicas without a mark for a day are removed."""
_FINAL = ("arena-full", "no-pacing")
"""Kinds of errors after which the next candidate is tried at once."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A daemon that may keep the replica."""

    host: str
    """Name, for display."""
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class Source:
    """The run to send, in one start of a job."""

    run: str
    store: str
    """Address of the store, for display."""
    host: str
    """Name of this host, for display."""
    start: str
    secret: bytes
    rate: float | None
    """Most bytes per second; None: no limit."""
    tls: Tls | None = None
    process: str = ""
    """Name of the training process's start, "" if it is `start`. With its first epoch it says what moments mean."""

    def describes_as(self, other: Source) -> bool:
        """Return whether both describe the same run, with the same files for TLS."""
        files = [None if one.tls is None else one.tls.files for one in (self, other)]
        return replace(self, tls=None) == replace(other, tls=None) and files[0] == files[1]

    def __repr__(self) -> str:
        return f"Source({self.run})"  # the secret must not appear in logs


class _RolledBack(Exception):
    """The run has restarted in the same arena."""


class Places:
    """The hosts that the copies of one run are on, or are tried: two copies on one host would replace each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: dict[Sender, Candidate] = {}

    def take(self, sender: Sender, host: Candidate) -> bool:
        """Have a sender use this host, and no longer its former one. Return False if another sender uses it."""
        with self._lock:
            if any(one == host for other, one in self._taken.items() if other is not sender):
                return False
            self._taken[sender] = host
            return True

    def has_free(self, hosts: Iterable[Candidate]) -> bool:
        """Return whether no sender uses one of these hosts."""
        with self._lock:
            return not set(hosts) <= set(self._taken.values())

    def user_of(self, host: Candidate) -> Sender | None:
        """Return the sender that uses this host; None if none does."""
        with self._lock:
            return next((sender for sender, one in self._taken.items() if one == host), None)


class Sender:
    """One copy of one run, which the first able candidate keeps."""

    def __init__(
        self,
        source: Source,
        candidates: Sequence[Candidate],
        arena: Arena,
        warn: Callable[[str], None] = lambda _: None,
        places: Places | None = None,
    ) -> None:
        """Prepare, without a connection. warn: called with warnings for the run's user. places: those of the run."""
        self._source = source
        self._candidates = tuple(candidates)
        self._arena = arena
        self._warn = warn
        self._follower = Follower(arena, most=_batch_bytes(source.rate))
        self.link = Link(len(self._candidates))
        self._marked = NEVER
        """Step of the newest mark that `_marker` has acknowledged."""
        self._marker: Candidate | None = None
        self._current: Counters = ()
        """Counters of the newest acknowledged mark."""
        self._whole = ""
        """Name of the whole state in the newest acknowledged mark."""
        self._places = places or Places()
        if self._candidates:
            self._places.take(self, self._candidates[0])
        self._channel: Channel | None = None
        self._begun = self._ended = self._acknowledged = self._wanted = 0
        """Numbers of rounds: the newest begun, the newest ended with a mark, the newest that sent everything, and the
        newest that a caller wants."""
        self._asking = threading.Lock()
        self._hurrying = False
        self._vouched_at = self.failed_at = -math.inf
        """Times on the monotonic clock: of the peer's last word; of the beginning of the newest attempt to connect
        that has failed, or whose connection has ended.
        """
        self._met_at = math.inf
        """Time of the first attempt to connect since a peer knew this start."""
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._done = False
        self._said: dict[Candidate, str] = {}
        """The kind of the newest warning about each host since the newest mark."""
        self._lacked = False
        """Whether the newest acknowledged mark lacked its extras."""
        self._thread = threading.Thread(target=self._run, name="scarctl-sender", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def close(self, *, done: bool, patience: float) -> None:
        """Send missing changes, within `patience` seconds, and end. done: the store has the whole state, sealed.

        If the link is not connected, nothing is sent.
        """
        self._done = done
        self._closing.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(patience)
        channel = self._channel
        if self._thread.is_alive() and channel is not None:
            channel.shut()

    def ask(self) -> int:
        """Have a round begin soon, and return its number. It sends the arena's present content."""
        with self._asking:
            wanted = self._begun + 1
            self._wanted = max(self._wanted, wanted)
        self._wake.set()
        return wanted

    def has_acknowledged(self, number: int) -> bool:
        """Return whether the peer has acknowledged all of round `number`, or of a later one, the extras included."""
        return self._acknowledged >= number

    def has_ended(self, number: int) -> bool:
        """Return whether round `number`, or a later one, has ended. It may lack extras that are too large."""
        return self._ended >= number

    @property
    def state(self) -> State:
        """The link's state."""
        return self.link.state

    @property
    def behind(self) -> int | None:
        """Steps that the peer is behind this host's memory; None without a complete replica on the peer."""
        return max(0, self._arena.head_step - self._marked) if self.link.complete else None

    def describe(self) -> str:
        """Return the link in words: "b: following, 4 behind"."""
        host, behind = self._candidates[self.link.at].host, self.behind
        if behind is None:
            return f"{host}: {self.state.value}"
        lacks = ", without extras that are too large" if self._follower.withheld else ""
        return f"{host}: {self.state.value}, {'up to date' if self.current else f'{behind} behind'}{lacks}"

    @property
    def current(self) -> bool:
        """Whether the peer has all of this arena's present content."""
        return self.behind == 0 and self._follower.counters() == self._current

    @property
    def host(self) -> Candidate:
        """The candidate that is connected, or being tried."""
        return self._candidates[self.link.at]

    @property
    def vouched_at(self) -> float:
        """Time of the peer's last word that it keeps a complete replica, on the monotonic clock; -inf if it may be
        gone.
        """
        return self._vouched_at if self.link.complete and self.state in CONNECTED else -math.inf

    def moments(self) -> Ids:
        """Return the moment of every copy that the peer has acknowledged: int64 (partitions,), 0 for none."""
        return self._follower.confirmed

    @property
    def whole(self) -> str:
        """Name of the whole state in this host's memory if the peer has all of its copies; otherwise ""."""
        return self._whole if self.current and self._whole == self._arena.whole else ""

    def hurry(self, rank: Ids | None) -> int:
        """Send in another order, starting at once, and return the number of the round that sends all present content.

        rank: place of each partition in the order; None: the usual one.
        """
        self._follower.rank = rank
        self._hurrying = True
        return self.ask()

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        be_polite()
        connect = self._handle(self.link.begin)
        while not self._closing.is_set() and not self.link.ended:
            if connect:
                self._connect()
            if self._hurrying:
                self._hurrying = False
                self._handle(self.link.hurry)
            connect = self._handle(self.link.tick, spare=self._places.has_free(self._candidates))
            if not connect:
                self._wake.wait(_PAUSE)
                self._wake.clear()
        self._handle(self.link.close)

    def _handle(self, event: Callable[..., bool | None], **details: bool) -> bool:
        """Call the link's method `event`. Return whether to connect."""
        before, at = self.link.state, self.link.at
        connect = event(time.monotonic(), **details)
        if self.link.state is not before and self._candidates:
            host = self._candidates[at].host
            log.info("%s: copy on %s: %s", self._source.run, host, self.link.state.value)
        return connect is True

    def _connect(self) -> None:
        """Send to the present candidate until the connection ends, and report the reason to the link."""
        peer, began = self.host, time.monotonic()
        self._met_at = min(self._met_at, began)
        try:
            if self._places.take(self, peer):
                self._converse(peer)
            else:
                self._handle(self.link.refused)
        except _RolledBack:
            self._handle(self.link.lost)
        except Gone as error:
            self._lost(peer, str(error), self.link.lost)
        except OSError as error:
            self._lost(peer, error.strerror or str(error), self.link.lost)
        except Fenced as error:
            self._lost(peer, str(error), self.link.overtaken)
        except ScarError as error:
            if error.kind == "unknown-start" and began <= self._met_at + REPLACED_AFTER:
                self._handle(self.link.lost)  # the peer's ranks begin later than these
            else:
                event = self.link.refused if error.kind in _FINAL else self.link.lost
                self._lost(peer, str(error), event, error.kind)
        except Exception as error:
            log.exception("sending to a peer failed unexpectedly")
            self._lost(peer, repr(error)[:200], self.link.lost)
        self.failed_at = began

    def _lost(self, peer: Candidate, why: str, event: Callable[[float], None], kind: str = "") -> None:
        said = kind or why  # the text of an error may name another file each time
        if self._said.get(peer) != said and not self._closing.is_set():
            self._said[peer] = said
            self._warn(
                f"the copy of this process's memory on {peer.host} ({peer.address}) is not kept up to date: {why}"
            )
        self._handle(event)

    def _converse(self, peer: Candidate) -> None:
        source, arena, follower = self._source, self._arena, self._follower
        hello = Hello.new(source.start, source.run, arena.epoch)
        with connected(
            peer.address, peer.port, hello, source.secret, source.tls, rate=source.rate
        ) as channel:
            layout = arena.layout_json()
            about = {"host": source.host, "store": source.store, "base_epoch": arena.base_epoch}
            about |= {"process": source.process} if source.process else {}
            channel.send(encode(Kind.LAYOUT, about, layout))
            head, body = channel.expect(Kind.ACK)
            follower.has(_have(body, arena.layout.partitions))
            if peer != self._marker:
                self._marker, self._marked = peer, NEVER
            # Its extras are unknown until the next mark.
            self._current, self._whole = (), ""
            self._ended = self._acknowledged = 0
            self._handle(self.link.accepted, complete=head.get("complete") is True)
            self._channel = channel
            try:
                self._follow(channel)
            finally:
                self._channel, self._met_at = None, math.inf

    def _follow(self, channel: Channel) -> None:
        looked = rounded = -1.0
        base = self._arena.base_epoch
        while not self.link.ended:
            closing = self._closing.is_set()
            if self._arena.base_epoch != base:
                raise _RolledBack  # its moments belong to another history: the peer begins a new replica
            if closing and self._done:
                channel.send(encode(Kind.DONE, {}))
                channel.expect(Kind.ACK)
                return
            began = time.monotonic()
            if (
                closing
                or self._wanted > self._ended
                or self._follower.lags()
                or (began > looked + _LOOK_SECONDS and self._follower.changed().any())
                or began > rounded + _SIGN_SECONDS
            ):
                rounded = began
                self._round(channel)
            if began > looked + _LOOK_SECONDS:
                looked = began
            if closing:
                return
            self._handle(self.link.tick, waiting=self._follower.lags())
            self._wake.wait(max(_PAUSE, (time.monotonic() - began) / 8))
            self._wake.clear()
            if readable(channel):
                channel.expect(Kind.ACK)  # no answer is due: this raises the reason why the peer ends

    def _round(self, channel: Channel) -> None:
        waiting = 0
        # Set before the arena is read: a later request is answered by the next round.
        self._begun += 1
        number = self._begun
        for frame in self._follower.round():
            channel.send(frame)
            waiting += 1
            if waiting >= _WINDOW:
                self._confirm(channel)
                waiting -= 1
        for _ in range(waiting):
            self._confirm(channel)
        if self._follower.ended:
            self._ended = number
            lacks, self._lacked = self._follower.withheld and not self._lacked, self._follower.withheld
            if lacks:
                host = self.host.host
                self._warn(
                    f"the copy of this process's memory on {host} lacks extras, which are too large to be sent"
                )
            if self._follower.withheld:
                self._current = ()
            else:
                self._acknowledged, self._current = number, self._follower.marked
            self._marked = self._follower.marked_step
            self._whole = self._follower.marked_whole
            self._said.clear()
            self._handle(self.link.marked)

    def _confirm(self, channel: Channel) -> None:
        channel.expect(Kind.ACK)
        self._follower.confirm()
        self._vouched_at = time.monotonic()
        self._handle(self.link.answered)


def _batch_bytes(rate: float | None) -> int:
    """Return the size of a batch in bytes: about a second's worth if the rate is limited."""
    return BATCH_BYTES if rate is None else max(_LEAST_BATCH, min(BATCH_BYTES, int(rate)))


def _have(body: Bytes, partitions: int) -> list[Ids]:
    """Return the arrays in the body of a peer's first answer: see `Replica.have`."""
    numbers = body.view(np.int64) if body.size % 8 == 0 else np.empty(0, np.int64)
    return [numbers[n * partitions : (n + 1) * partitions].copy() for n in range(2)]
