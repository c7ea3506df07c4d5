"""Add up small arrays of all ranks, in rounds. A background thread does it, so that training never waits for a rank.

Every rank joins every round, in the same order. A late rank delays the round, and the rounds after it, but not the
training of other ranks: these wait for a short time, then continue without the result. If a peer has died, is too
slow, or is in another round than this rank, the exchange fails on all ranks. No round follows.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

log = logging.getLogger("scarctl")

TIMEOUT = 300.0
"""Seconds that a rank may be late before it counts as dead."""
LINGER = 2.0
"""Seconds that closing waits for current rounds, so that the other ranks can finish theirs."""
BEHIND = 10_000
"""Rounds that may wait for a late rank."""

_SWITCH = 0x5CA2
"""Tag of a message that is never sent."""


class Turn(Protocol):
    """One rank's part in a round."""

    def send(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return two arrays. Their shapes are the same in all turns of all ranks."""

    def receive(self, most: NDArray[np.int64], sums: NDArray[np.int64]) -> bool:
        """Continue with the elementwise maximum of all ranks' first arrays, and the sum of their second arrays.

        Returns whether another `send` follows: equal on all ranks.
        """


class Group(Protocol):
    """The used methods of a gloo group: `dist.ProcessGroupGloo`, or a result of `dist.new_group(backend="gloo")`."""

    def allreduce(self, tensors: list[torch.Tensor], opts: dist.AllreduceOptions, /) -> dist.Work: ...

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int, /) -> dist.Work: ...


class Round:
    """A round that this rank has joined. The result of its turn is valid once it is `done` and not `failed`."""

    def __init__(self, step: int, turn: Turn, reported: Sequence[int]) -> None:
        self.step = step
        self.turn = turn
        self.reported = reported
        """Numbers of this rank; once the round is done, the maximum of each over all ranks."""
        self.done = False
        self.failed = False
        self.given_up = False
        """Whether training has stopped waiting for this round."""


class Exchange:
    """The rounds of one rank. `join`, `wait` and `hurry` never raise because of other ranks."""

    def __init__(
        self, group: Group, rank: int, world: int, *, timeout: float = TIMEOUT, linger: float = LINGER
    ) -> None:
        """Start the thread.

        group: a gloo group of all ranks for this exchange alone. Its connections are closed on failure and at the end.
        """
        self.rank = rank
        self.world = world
        self.failure: str | None = None
        """The reason why rounds have ended; None while they run."""
        self._group: Group | None = group
        self._timeout = timedelta(seconds=timeout)
        self._linger = linger
        self._changed = threading.Condition()
        self._rounds: deque[Round] = deque()  # the first round is being carried out
        self._hurried = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="scarctl-exchange", daemon=True)
        self._thread.start()

    # -- for the session ------------------------------------------------------------------------------------------

    def join(self, step: int, turn: Turn, reported: Sequence[int] = ()) -> Round:
        """Join the round of `step`, after all rounds joined before. Returns at once.

        reported: numbers for `result`, as many on all ranks.
        """
        joined = Round(step, turn, reported)
        with self._changed:
            if self.failure is None and not self._closing and len(self._rounds) >= BEHIND:
                self._fail(f"another rank is {BEHIND} rounds behind")
            if self.failure is not None or self._closing:
                joined.done = joined.failed = True
            else:
                self._rounds.append(joined)
                self._changed.notify_all()
        return joined

    def hurry(self, now: bool = True) -> None:
        """Begin to count the patience of `wait`: training waits for the waiting thread. now=False stops it."""
        with self._changed:
            self._hurried = now
            self._changed.notify_all()

    def wait(self, joined: Round, patience: float) -> bool:
        """Wait for a round until it is done, or `patience` seconds after `hurry`. Return whether there is a result.

        If an earlier round was given up and is still open, wait only until `hurry`.
        """
        with self._changed:
            self._changed.wait_for(lambda: joined.done or self._hurried)
            if not any(earlier.given_up for earlier in self._rounds):
                self._changed.wait_for(lambda: joined.done, patience)
            joined.given_up = not joined.done
            return joined.done and not joined.failed

    def result(self, joined: Round) -> Sequence[int]:
        """Wait for a round, and return the maximum of each number reported in it; () if it failed."""
        with self._changed:
            self._changed.wait_for(lambda: joined.done)
            return () if joined.failed else joined.reported

    def replace(self, joined: Round, turn: Callable[[], Turn]) -> bool:
        """Replace the turn of a round that has not begun. Return whether it was replaced."""
        with self._changed:
            if joined.done or self._rounds[0] is joined:
                return False
            joined.turn = turn()
            return True

    def close(self) -> None:
        """End the thread, within `linger` seconds and the time to close connections. Peers still in a round fail."""
        with self._changed:
            if self.failure is None:
                self._changed.wait_for(lambda: not self._rounds, self._linger)
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive() and self._rounds:
            self._break_off()
        self._thread.join()
        self._group = None

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (joined := self._next()) is not None:
            try:
                reason = self._carry_out(joined)
            except Exception as error:
                reason = str(error).partition("\n")[0].partition(". This is typically")[0]
            with self._changed:
                if reason is None:
                    joined.done = True
                    self._rounds.popleft()
                else:
                    self._fail(reason)
                self._changed.notify_all()
            if reason is not None:
                self._break_off()

    def _next(self) -> Round | None:
        """Wait for the next round, and return it; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._rounds or self._closing or self.failure is not None)
            return self._rounds[0] if self._rounds and self.failure is None else None

    def _carry_out(self, joined: Round) -> str | None:
        """Carry out a round. Return the reason of its failure, None if it succeeded."""
        level, more = 0, True
        while more:
            most, sums = joined.turn.send()
            place = np.array([joined.step, level], dtype=np.int64)
            head = np.concatenate((place, -place, np.array(joined.reported, dtype=np.int64)))
            most, sums = self._reduce(np.concatenate((head, most)), sums)
            (step, level_most), (least_step, least_level) = most[:2].tolist(), (-most[2:4]).tolist()
            if least_step != step:
                return f"some ranks are at the round of step {least_step} and others at that of step {step}"
            if least_level != level_most:
                return f"ranks disagree about the round of step {step}"
            count = 4 + len(joined.reported)
            joined.reported = most[4:count].tolist()
            more = joined.turn.receive(most[count:], sums)
            level += 1
        return None

    def _reduce(
        self, most: NDArray[np.int64], sums: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if self.world == 1:
            return most, sums
        assert self._group is not None
        # Both are sent at once, because latency dominates their time. They are copies, because gloo may still write
        # to a tensor after its connection was closed.
        tensors = torch.from_numpy(most.copy()), torch.from_numpy(sums.copy())
        works = [
            self._group.allreduce([tensor], self._options(operation))
            for tensor, operation in zip(tensors, (dist.ReduceOp.MAX, dist.ReduceOp.SUM), strict=True)
        ]
        for work in works:
            work.wait()
        return tensors[0].numpy(), tensors[1].numpy()

    def _options(self, operation: dist.ReduceOp.RedOpType) -> dist.AllreduceOptions:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(operation)
        options.timeout = self._timeout
        return options

    def _fail(self, reason: str) -> None:
        """End all rounds permanently, with the lock held."""
        if self.failure is not None:
            return
        self.failure = reason
        for joined in self._rounds:
            joined.done = joined.failed = True
        self._rounds.clear()
        self._changed.notify_all()
        if not self._closing:
            log.warning(
                "rank %d selects partitions without the other ranks from now on: %s", self.rank, reason
            )

    def _break_off(self) -> None:
        """Close the group's connections, so that waiting collectives fail, here and in the peers.

        Gloo has no call for that: its `abort` leaves a collective waiting, and its destructor waits for it. But a
        receive that times out closes all connections of the group at once. A receive from a dead peer fails without
        closing them, so all peers are tried.
        """
        group = self._group
        if group is None:
            return
        for away in range(1, self.world):
            try:
                peer = (self.rank + away) % self.world
                group.recv([torch.zeros(1)], peer, _SWITCH).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                log.debug("rank %d closed its connection to rank %d: %s", self.rank, peer, error)
