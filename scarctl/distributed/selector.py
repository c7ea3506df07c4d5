"""What one rank's session saves: its part of a selection over all ranks, or its own choice without them."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from scarctl.distributed.global_selection import Books, Offer, Turn, no_offer, pick, pick_alone
from scarctl.distributed.rounds import Exchange, Round
from scarctl.policy.select import Selection, select
from scarctl.util.arrays import Ids

LAG = 2
"""Rounds between a wish and what comes of it."""
PATIENCE = 0.05
"""Seconds that a training thread may wait for other ranks at a checkpoint."""


class GlobalSelector:
    """Selects with the other ranks at regular checkpoints, and alone at those asked for by hand.

    A regular checkpoint goes: `expect` when it is due, `select` from the copy beside the next forward and backward,
    `hurry` when the training thread begins to wait for that copy, and `settle` when it has ended, whatever came of
    it. One checkpoint is under way at a time; `select` runs in another thread than the rest.
    """

    def __init__(self, exchange: Exchange, shard: int, *, patience: float = PATIENCE) -> None:
        """shard: of this rank, which no other rank has. patience: seconds, see `Exchange.wait`."""
        self.shared = True
        self.wish = 0
        """What this rank wants all to know; the largest wins. See `agreed`."""
        self.proposed = 0
        """Interval that this rank would keep, in iterations."""
        self.interval = 0
        """The largest that a rank proposed `LAG` rounds ago, as of the last `agreed`; 0: there was no such round."""
        self._rounds: deque[Round] = deque()
        self.late = 0
        """Rounds that this rank did not wait for."""
        self._exchange = exchange
        self._shard = shard
        self._patience = patience
        self._books = Books()
        self._expected: tuple[int, int] | None = None  # step, budget
        self._spent = 0
        """Bytes picked since the last round that have to be told."""
        self._credit: int | None = None
        """Of picks alone, None before the first pick."""

    def expect(self, step: int, budget: int) -> None:
        """A regular checkpoint is due at `step`, and on all ranks; budget: bytes, this rank's."""
        self.settle()
        self._exchange.hurry(False)
        self._expected = (step, budget)

    @property
    def expecting(self) -> bool:
        """Whether an expected checkpoint is not settled."""
        return self._expected is not None

    def hurry(self) -> None:
        """The training thread waits."""
        self._exchange.hurry()

    def settle(self) -> None:
        """If the expected checkpoint came to nothing, join its round with nothing: the other ranks count on it."""
        expected, self._expected = self._expected, None
        if expected is not None:
            step, budget = expected
            self._join(step, self._turn(no_offer(), budget))

    def agreed(self) -> int:
        """The largest wish that ranks had `LAG` rounds ago. To be asked once before each `expect`, on all ranks.

        So long ago, because by then every rank knows: nobody waits, unless a rank is that far behind. Sets `interval`.
        """
        if len(self._rounds) < LAG:
            self.interval = 0
            return 0
        wish, self.interval = self._exchange.result(self._rounds.popleft())
        return wish

    def close(self) -> None:
        """Leave. Never hangs; see `Exchange.close`."""
        self._exchange.close()

    def select(
        self,
        policy: str,
        *,
        distance_sq: NDArray[np.float64],
        nbytes: Ids,
        staleness: Ids,
        eligible: NDArray[np.bool_],
        budget: int,
        credit: int = 0,
        cursor: int = 0,
        seed: int = 0,
        step: int = 0,
        max_staleness: int | None = None,
    ) -> Selection:
        """Pick this rank's partitions. Arguments as of `policy.select`, which does the same for one session.

        budget: this rank's; what counts is the sum over ranks. credit: bytes left over by an earlier run; only the
        first call looks at it. The result's credit is that of all ranks together where they selected together.
        """
        if policy == "full":
            return select(
                policy,
                distance_sq=distance_sq,
                nbytes=nbytes,
                staleness=staleness,
                eligible=eligible,
                budget=budget,
                credit=credit,
                cursor=cursor,
            )
        offer = Offer(
            policy,
            distance_sq=distance_sq,
            nbytes=nbytes,
            staleness=staleness,
            eligible=eligible,
            shard=self._shard,
            seed=seed,
            step=step,
            max_staleness=max_staleness,
        )
        if self._credit is None:
            self._credit = max(0, credit)
        expected, self._expected = self._expected, None
        if expected is None:
            ids, left = self._alone(offer, budget)
        else:
            ids, left = self._with_others(offer, expected[0], budget)
        return Selection(ids, int(nbytes[ids].sum()), left, cursor, offer.nonfinite)

    def _join(self, step: int, turn: Turn) -> Round:
        joined = self._exchange.join(step, turn, (self.wish, self.proposed))
        self._rounds.append(joined)
        return joined

    def _with_others(self, offer: Offer, step: int, budget: int) -> tuple[Ids, int]:
        """Picks, and the credit that they leave."""
        books, turn = self._books, self._turn(offer, budget)
        joined = self._join(step, turn)
        if self._exchange.wait(joined, self._patience):
            ids = pick(offer, turn.threshold)
            self._spent = int(offer.nbytes[ids].sum())
            left = max(0, books.credit)
            self._credit = left * budget // max(1, books.budget)
            return ids, left
        if joined.failed:
            return self._alone(offer, budget)
        # The others still count on what this rank said of its budget, unless it has not been sent.
        self.late += 1
        told = (turn.spent, turn.credit)
        if self._exchange.replace(
            joined, lambda: Turn(books, no_offer(), budget=0, spent=told[0], credit=told[1])
        ):
            return self._from(offer, budget)
        if books.share is not None:
            budget = int(books.share * books.budget)
        ids, left = self._from(offer, budget)
        self._spent = int(offer.nbytes[ids].sum())
        return ids, left

    def _alone(self, offer: Offer, budget: int) -> tuple[Ids, int]:
        ids, left = self._from(offer, budget)
        # A budget that no round knows of, but credit that they do.
        self._spent += max(0, int(offer.nbytes[ids].sum()) - budget)
        return ids, left

    def _from(self, offer: Offer, budget: int) -> tuple[Ids, int]:
        """Pick by this rank's own order."""
        cap = budget + offer.largest
        room = budget + min(self._credit or 0, cap)
        ids = pick_alone(offer, room)
        self._credit = min(room - int(offer.nbytes[ids].sum()), cap)
        return ids, self._credit

    def _turn(self, offer: Offer, budget: int) -> Turn:
        spent, self._spent = self._spent, 0
        return Turn(self._books, offer, budget=budget, spent=spent, credit=self._credit or 0)
