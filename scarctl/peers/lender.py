"""Send arenas of dead processes, and replicas, to hosts that fetch them: the other side of `scarctl.peers.fetch`.

    other host -> INVENTORY                 -> the arena's age and line, or nothing, and whether its process lives
    other host -> FETCH                     -> the same, with the number and bytes of its small files
    other host -> ACK, it has reserved room -> FILE for each small file, PIECE for each piece, END with the digest
    other host -> ACK, it has the arena     -> ACK, once no process here saves the run

An arena is lent, not given: it stays, locked so that it does not change meanwhile. The daemon does not save a lent run.
If the fetch fails, it continues. A process of this host that needs the arena ends the loan at once.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from scarctl.arena.age import age_of
from scarctl.arena.arena import Arena
from scarctl.arena.transfer import PIECE, Outgoing
from scarctl.arena.view import peek_in
from scarctl.errors import Contention, Corruption, NoIntactCopy, ScarError
from scarctl.peers.channel import REPLY_SECONDS, Channel
from scarctl.peers.frames import MAX_BODY, Buffer, Kind, Offer, encode
from scarctl.peers.replica import RUN_ID

log = logging.getLogger("scarctl")

GRACE_SECONDS = 3.0
"""Seconds that an ending daemon gives to fetches under way."""
PIECE_SECONDS = 30.0
"""Seconds in which the other side has to take, or send, a piece or a small file. A daemon saves nothing meanwhile."""
_LATE_SECONDS = 1.0
"""Seconds after that, in which those that are not finished are refused."""
_IDLE_SECONDS = 10.0
_MOST_LOANS = 64
"""Most hosts, or ranks of them, that fetch at the same time."""
_LEAST_RATE = 64 << 10
"""Bytes per second that a host sends at least: a piece must not take minutes, in which no one sees progress."""


def seconds_for(size: int, rate: int) -> float:
    """Return the seconds in which both sides expect a piece, or a small file. rate: see `Offer`."""
    return PIECE_SECONDS + (size / max(rate, _LEAST_RATE) if rate else 0.0)


@dataclass(eq=False, slots=True)
class Loan:
    """An arena that another host is fetching."""

    recall: Callable[[], None]
    """Ends the loan soon."""
    until: float | None = None
    """Time at which the loan ends, on the monotonic clock; None: once the other host has the arena."""
    fetched: bool = False
    """Whether the other host has all of the arena, in its place."""


class Lend(Protocol):
    """Keeps a run's arena from changing: see `scarctl.daemon.runs.Runs.lent`."""

    def __call__(self, name: str, recall: Callable[[], None]) -> contextlib.AbstractContextManager[Loan]: ...


@contextlib.contextmanager
def lent_without_runs(name: str, recall: Callable[[], None]) -> Iterator[Loan]:
    """Lend an arena of a daemon that saves no runs."""
    yield Loan(recall)


class Lender:
    """Lends the arenas of one daemon's folder."""

    def __init__(
        self, folder: Path, lend: Lend = lent_without_runs, lives: Callable[[str], bool] = lambda name: False
    ) -> None:
        """Prepare. folder: folder of the daemon. lives: see `scarctl.daemon.runs.Runs.lives`."""
        self._folder = folder
        self._lend, self._lives = lend, lives
        self._changed = threading.Condition()
        self._open: dict[str, tuple[Arena, int]] = {}
        """Arenas by run, each with the number of hosts that fetch it."""
        self._channels: list[Channel] = []
        self._until: float | None = None
        """Time at which all loans end; None while the daemon stays."""

    @property
    def busy(self) -> bool:
        """Whether another host is fetching an arena."""
        with self._changed:
            return bool(self._channels)

    def serve(self, channel: Channel, run: str, kind: Kind, rate: float | None = None) -> None:
        """Answer a host that fetches. kind: that of its first frame, INVENTORY or FETCH.

        rate: most bytes per second to send, but at least 64 KiB; None: no limit.

        Raises Gone, Corruption; after a refusal its reason.
        """
        if not RUN_ID.fullmatch(run):
            raise Corruption(f"a peer names a run that is not a rank's: {run!r:.80}")
        while kind is Kind.INVENTORY:
            channel.send(self._inventory(run))
            channel.within(_IDLE_SECONDS)
            kind, _, _ = channel.receive(most_body=0, strictly=True)
        if kind is not Kind.FETCH:
            raise Corruption(f"a peer sends {kind.name} to a host from which it fetches")
        try:
            self._serve_fetch(channel, run, 0 if rate is None else max(int(rate), _LEAST_RATE))
        except ScarError as error:
            channel.refuse(error)
            raise
        channel.within(PIECE_SECONDS)
        channel.send(encode(Kind.ACK, {}))

    def hurry(self) -> None:
        """Give fetches under way some seconds, and refuse all others: the daemon is about to end."""
        with self._changed:
            if self._until is None:
                self._until = time.monotonic() + GRACE_SECONDS

    def close(self) -> None:
        """End all fetches, those under way within some seconds."""
        self.hurry()
        with self._changed:
            assert self._until is not None
            left = max(0.0, self._until - time.monotonic())
            self._changed.wait_for(lambda: not self._channels, left + _LATE_SECONDS)
            late = list(self._channels)
        for channel in late:
            channel.shut()

    def _inventory(self, run: str) -> list[Buffer]:
        alive = self._lives(run)
        offer = None if alive or self._until is not None else self._offer(run)
        return (
            encode(Kind.INVENTORY, {"found": False, "alive": alive})
            if offer is None
            else offer.frame(Kind.INVENTORY)
        )

    def _offer(self, run: str) -> Offer | None:
        """Return the arena of a run that may be fetched, without its files; None without one."""
        view = peek_in(self._folder / run, run)
        age = age_of(view)
        if view is None or age is None:
            return None
        return Offer(age, view.epoch, view.size, view.line)

    def _serve_fetch(self, channel: Channel, run: str, rate: int) -> None:
        if rate:
            channel.limit_rate(rate)
        with self._counted(channel), self._lend(run, channel.shut) as loan, self._locked(run) as arena:
            offer = self._offer(run)
            if offer is None:
                raise NoIntactCopy(
                    f"there is no arena of {run} on this host that could be fetched", kind="no-arena"
                )
            outgoing = Outgoing(arena, most=MAX_BODY)
            try:
                self._send(channel, outgoing, offer, loan, rate)
            finally:
                outgoing.close()
            channel.within(PIECE_SECONDS)
            channel.expect(Kind.ACK)
            loan.fetched = True
            log.info("%s: another host has fetched %d bytes of this host's memory", run, outgoing.size)

    def _send(self, channel: Channel, outgoing: Outgoing, offer: Offer, loan: Loan, rate: int) -> None:
        whole = Offer(
            offer.age,
            offer.epoch,
            outgoing.size,
            offer.line,
            outgoing.count,
            outgoing.files_size,
            len(outgoing.withheld),
            rate,
            outgoing.gap,
        )
        channel.within(REPLY_SECONDS)
        channel.send(whole.frame(Kind.FETCH))
        channel.expect(Kind.ACK)
        for name, data in outgoing.files():
            self._require_time(channel, loan, seconds_for(len(data), rate))
            channel.send(encode(Kind.FILE, {"name": name}, data))
        for at in range(0, outgoing.size, PIECE):
            size = min(PIECE, outgoing.size - at)
            self._require_time(channel, loan, seconds_for(size, rate))
            channel.send(encode(Kind.PIECE, {}, outgoing.read(at, size)))
        channel.send(encode(Kind.END, {"digest": outgoing.digest()}))

    def _require_time(self, channel: Channel, loan: Loan, seconds: float) -> None:
        """Give the other side `seconds` for the next piece. Raises Contention once the loan has to end."""
        ends = [until for until in (self._until, loan.until) if until is not None]
        if ends and time.monotonic() > min(ends):
            raise _ending()
        channel.within(seconds)

    @contextlib.contextmanager
    def _counted(self, channel: Channel) -> Iterator[None]:
        with self._changed:
            if self._until is not None:
                raise _ending()
            if len(self._channels) >= _MOST_LOANS:
                raise Contention(f"{_MOST_LOANS} other hosts are fetching from this one", kind="run-busy")
            self._channels.append(channel)
        try:
            yield
        finally:
            with self._changed:
                self._channels.remove(channel)
                self._changed.notify_all()

    @contextlib.contextmanager
    def _locked(self, run: str) -> Iterator[Arena]:
        """Open a dead process's arena, and hold its lock. Several hosts may fetch it at once.

        Raises Contention if a live process uses it, NoIntactCopy without an arena, AccessDenied, Corruption.
        """
        with self._changed:
            arena, users = self._open.get(run, (None, 0))
            if arena is None:
                arena = Arena.open_existing(self._folder / run, run_id=run)
            if arena is None:
                raise NoIntactCopy(f"there is no arena of {run} on this host", kind="no-arena")
            self._open[run] = arena, users + 1
        try:
            yield arena
        finally:
            with self._changed:
                _, users = self._open.pop(run)
                if users > 1:
                    self._open[run] = arena, users - 1
                else:
                    arena.close()


def _ending() -> Contention:
    return Contention("the daemon is ending, or its host needs the memory itself", kind="daemon-ending")
