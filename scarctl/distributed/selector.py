"""Select the partitions that one rank saves: its part of a selection over all ranks, or a selection alone."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import torch

from scarctl.checkpoint.selector import LAG, Selector
from scarctl.distributed import global_selection
from scarctl.distributed.common import digest_of
from scarctl.distributed.global_selection import Books, Offer, no_offer, pick, pick_alone
from scarctl.distributed.rounds import Exchange, Round
from scarctl.policy.select import Candidates, Selection, select
from scarctl.policy.turns import Turn
from scarctl.util.arrays import Ids

log = logging.getLogger("scarctl")

_UNKNOWN = -(1 << 63)
"""A sample that was not taken, which no other one is compared with."""
_AGREED = 8
"""Fewest samples in a row that must be equal until ranks which differed count as equal again. It is doubled each time
that they differ once more, as between the rounds of an average."""
PATIENCE = 0.05
"""Seconds that a training thread may wait for other ranks at a checkpoint."""


class GlobalSelector(Selector):
    """Selects with the other ranks at regular checkpoints, and alone at requested ones.

    The calls of a regular checkpoint: `expect` when it is due; `select` in the copy thread, concurrently with forward
    and backward; `hurry` when training begins to wait for the copy; `settle` when the copy has ended, or has failed.
    Only one checkpoint runs at a time. All calls but `select` come from the training thread.
    """

    shared = True

    def __init__(
        self,
        exchange: Exchange,
        shard: int,
        *,
        patience: float = PATIENCE,
        sample: Callable[[int], torch.Tensor | None] = lambda number: None,
        turns: int = 1,
    ) -> None:
        """Use an exchange, which this selector closes. shard: this rank's. patience: seconds, see `Exchange.wait`.

        sample: returns values that all ranks have in common, given a number that grows; see `Common.sample`.
        turns: number of samples that have a value of each parameter.
        """
        self._rounds: deque[Round] = deque()
        self.late = 0
        """Rounds in which this rank stopped waiting for others."""
        self._exchange = exchange
        self._shard = shard
        self._patience = patience
        self._books = Books()
        self._expected: tuple[int, int] | None = None  # step, budget
        self._sample = sample
        self._needed = max(turns, _AGREED)
        """Equal samples in a row after which ranks that differed count as equal."""
        self._equal = 0
        self._joined = 0
        """Rounds joined: the same number on all ranks that have settled the same checkpoints."""
        self._due = False
        """Whether the newest expected checkpoint is still to be sampled."""
        self._sampled: torch.Tensor | None = None
        """Sample of the newest settled checkpoint, for the next round."""
        self._digest = 0
        """Digest of a sample for the present round; 0 without one."""
        self._spent = 0
        """Bytes picked since the last round, for the next one."""
        self._credit: int | None = None
        """Credit of picks without other ranks, in bytes; None before the first pick."""

    def expect(self, step: int, budget: int) -> None:
        """Announce that a regular checkpoint is due at `step`, on all ranks. budget: bytes that this rank may save."""
        if self._due:  # it ended without having settled
            self._due, self._sampled = False, None
        self.settle()
        self._exchange.hurry(False)
        self._expected, self._due = (step, budget), True

    @property
    def expecting(self) -> bool:
        """Whether an expected checkpoint is not settled."""
        return self._expected is not None

    def hurry(self) -> None:
        """Note that the training thread waits for the copy."""
        self._exchange.hurry()

    def settle(self) -> None:
        """Join the round of a checkpoint that did not select, without candidates: other ranks wait for it."""
        expected, self._expected = self._expected, None
        if expected is not None:
            step, budget = expected
            self._join(step, self._turn(no_offer(), budget))
        due, self._due = self._due, False
        if due:
            # Only now, because a loop may clip or replace weights after the step.
            try:
                self._sampled = self._sample(self._joined)
            except Exception as error:  # raised here it would end the training
                log.warning(
                    "rank %d cannot compare its parameters with other ranks: %s", self._exchange.rank, error
                )
                self._sample = lambda number: None

    def agreed(self) -> int:
        """Return the largest request of the round `LAG` rounds ago, and set `interval`. Call once before each `expect`.

        By then all ranks have finished that round, so no rank waits, unless another one is that late.
        """
        reported = self._exchange.result(self._rounds.popleft()) if len(self._rounds) >= LAG else ()
        if not reported:
            self.interval, self.turn = 0, Turn.NOTHING
            return 0
        request, self.interval, unwanted, largest, negated = reported
        self.turn = Turn(-unwanted)
        if _UNKNOWN not in (largest, negated):
            self._compared(equal=largest == -negated)
        return request

    def _compared(self, *, equal: bool) -> None:
        """Note the comparison of one sample. All ranks get the same ones."""
        if not equal:
            self.differs, self._equal = True, 0
        elif self.differs:
            self._equal += 1
            if self._equal >= self._needed:
                self.differs, self._needed = False, 2 * self._needed

    def close(self) -> None:
        """Close the exchange. Never hangs; see `Exchange.close`."""
        self._exchange.close()

    def read_sample(self) -> None:
        """Read the sample of the checkpoint before, for the round of this one: `select` does, or this alone."""
        if self._expected is not None:
            sampled, self._sampled = self._sampled, None
            self._digest = digest_of(sampled)  # if this fails, `settle` joins the round

    def select(
        self, policy: str, among: Candidates, budget: int, *, credit: int = 0, cursor: int = 0
    ) -> Selection:
        """Pick this rank's partitions. The arguments are those of `policy.select`, the selection for one session.

        budget: bytes that this rank may save. A common selection uses the sum over ranks.
        credit: bytes left by an earlier run. Only the first call uses it.

        After a common selection the result's credit is that of all ranks.
        """
        self.read_sample()
        if policy == "full":
            return select(policy, among, budget, credit=credit, cursor=cursor)
        offer = Offer(policy, among, shard=self._shard)
        if self._credit is None:
            self._credit = max(0, credit)
        expected, self._expected = self._expected, None
        if expected is None:
            ids, left = self._alone(offer, budget)
        else:
            ids, left = self._with_others(offer, expected[0], budget)
        return Selection(ids, int(among.nbytes[ids].sum()), left, cursor, offer.nonfinite)

    def _join(self, step: int, turn: global_selection.Turn) -> Round:
        sampled, self._digest = self._digest, 0
        samples = (sampled, -sampled) if sampled else (_UNKNOWN, _UNKNOWN)
        joined = self._exchange.join(step, turn, (self.request, self.proposed, -self.wants, *samples))
        self._rounds.append(joined)
        self._joined += 1
        return joined

    def _with_others(self, offer: Offer, step: int, budget: int) -> tuple[Ids, int]:
        """Return the picks of a common selection, and the credit that they leave."""
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
        # Unless the turn was replaced, the other ranks have received this rank's budget and count on it.
        self.late += 1
        spent, credit = turn.spent, turn.credit
        if self._exchange.replace(
            joined, lambda: global_selection.Turn(books, no_offer(), budget=0, spent=spent, credit=credit)
        ):
            return self._from(offer, budget)
        if books.share is not None:
            budget = int(books.share * books.budget)
        ids, left = self._from(offer, budget)
        self._spent = int(offer.nbytes[ids].sum())
        return ids, left

    def _alone(self, offer: Offer, budget: int) -> tuple[Ids, int]:
        ids, left = self._from(offer, budget)
        # Rounds have not counted this budget, but they have counted the credit.
        self._spent += max(0, int(offer.nbytes[ids].sum()) - budget)
        return ids, left

    def _from(self, offer: Offer, budget: int) -> tuple[Ids, int]:
        """Pick partitions without the other ranks."""
        cap = budget + offer.largest
        room = budget + min(self._credit or 0, cap)
        ids = pick_alone(offer, room)
        self._credit = min(room - int(offer.nbytes[ids].sum()), cap)
        return ids, self._credit

    def _turn(self, offer: Offer, budget: int) -> global_selection.Turn:
        spent, self._spent = self._spent, 0
        return global_selection.Turn(self._books, offer, budget=budget, spent=spent, credit=self._credit or 0)
