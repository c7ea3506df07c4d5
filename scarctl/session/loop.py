"""Track and restore the position of a training loop that reads `Session.epochs` and `Session.batches`.

When the loop requests the next batch, it is *settled*: everything that belongs to the step is done, such as schedules
and averages. A checkpoint gets the extras, schedules and random numbers of that moment, and the position. The position
is the epoch, and for each pass over a loader in that epoch the number of batches handed out.

A resumed loop repeats each pass from the random numbers with which it began, without the used batches. The random
numbers of the settled moment are restored last, right before the first new batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from scarctl.checkpoint.randomness import raw, restore_rng, undisturbed
from scarctl.session.numbering import is_enumerated
from scarctl.session.passes import END, Pass, Rng, leave
from scarctl.state.caveats import Caveats

T = TypeVar("T")
_OTHERS = (
    "the data have other random generators than when the run stopped: make them in the constructor, or put them into "
    "extras"
)


class Host(Protocol):
    """The methods of a session that its loop calls."""

    @property
    def caveats(self) -> Caveats:
        """Caveats to which the loop reports why it is not exact."""

    @property
    def head_step(self) -> int:
        """Iterations finished."""

    def settled(self) -> None:
        """Note that everything that belongs to the newest step is done, and that the loop's position is current."""

    def handed_out(self) -> None:
        """Note that the loop continues with a batch."""

    def begins(self) -> None:
        """Note that the loop is about to change state before the batches of an epoch."""

    def repeating(self) -> None:
        """Note that the loop is about to repeat its changes before the batches of an epoch."""

    def repeated(self) -> None:
        """Undo the loop's changes since `repeating`: the restored state already includes them."""

    def doubt(self, reason: str) -> None:
        """Note that the loop may not continue as the earlier run would have."""


class Loop:
    """The epochs and batches of one session."""

    def __init__(self, host: Host, rank: int) -> None:
        self._host = host
        self._rank = rank
        self.used = False
        """Whether the loop reads `epochs` or `batches`."""
        self._counted = False
        """Whether it reads `epochs`."""
        self.epoch = 0
        """Current epoch, from 0."""
        self.batch = 0
        """Number of the newest batch in its pass, from 0."""
        self._begun: Rng | None = None
        """Random numbers with which this epoch began."""
        self._passes: list[Pass] = []
        """Passes of this epoch."""
        self._former: list[Pass] = []
        """Passes of the previous epoch. The next epoch reads their loaders again."""
        self._left: list[Mapping[str, Any]] = []
        """State of the loaders when the resumed run stopped, by number of their passes."""
        self._known: set[int] = set()
        """Ids of loaders whose state this process knows."""
        self._again: list[Mapping[str, Any]] = []
        """Passes of this epoch that a resumed loop must still repeat."""
        self._held: Rng | None = None
        """Random numbers with which a resumed loop will continue, until it does."""
        self._repeating = False
        """Whether the loop repeats the beginning of an epoch until then."""
        self._position: dict[str, Any] | None = None
        """Position of the last settled moment."""
        self._head = 0
        """The session's step at that moment."""
        self._since = 0
        """Batches handed out since that moment."""
        self._restored: int | None = None
        """The step from which the loop resumed."""
        self._workers: dict[int, Rng] = {}
        """Random numbers with which persistent workers were started, by id of their loader."""

    def epochs(self, count: int) -> Iterator[int]:
        """See `Session.epochs`."""
        self.used = self._counted = True
        for epoch in range(self.epoch, count):
            if self._again and self._begun is not None:
                # The loop's work and draws before its first pass are repeated.
                self._repeating = True
                self._host.repeating()
                restore_rng(self._begun)
            else:
                self._proceed()
                self._host.begins()
                self._begun = raw()
            yield epoch
            if self.epoch == epoch:
                self._next_epoch()
        self._proceed()

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """See `Session.batches`."""
        found: list[weakref.ref[Iterator[T]]] = []
        iterator = self._batches(loader, found)
        found.append(weakref.ref(iterator))
        return iterator

    def _batches(self, loader: Iterable[T], itself: list[weakref.ref[Iterator[T]]]) -> Iterator[T]:
        """Yield the batches. itself: receives a reference to this iterator."""
        self.used = True
        if not self._counted and self._passes and not self._again and all(made.done for made in self._passes):
            self._host.caveats.say(
                "passes-without-epochs",
                "session.batches() is read several times without session.epochs(): where a loop does something after "
                "each time, such as stepping a schedule, it does that at other steps after resuming",
            )
            if self._restored == self._host.head_step:
                self._host.doubt(
                    "session.batches() had nothing left where the run was stopped and is read again without "
                    "session.epochs(): the loop may count that as one more epoch"
                )
            self._next_epoch()
        saved = self._again.pop(0) if self._again else None
        number = len(self._passes)
        unknown = saved is None and id(loader) not in self._known and number < len(self._left)
        if unknown and not leave(loader, self._left[number]):
            self._host.doubt(_OTHERS)
        self._known.add(id(loader))
        this = Pass(loader, self._workers)
        if saved is None:
            if self._stale():
                self._settle()
            self._proceed()
            self._passes.append(this)
            iterator = this.begin()
        else:
            self._passes.append(this)
            with undisturbed():
                iterator = this.begin_again(saved, same_rank=self._rank == saved["rank"])
            if this.others:
                self._host.doubt(_OTHERS)
            if this.differs:
                self._host.doubt(
                    f"batch {this.count - 1} of the epoch, the last one before the run stopped, is another one now: "
                    "the data, their order or the batch size have changed"
                )
            if self._rank != saved["rank"]:
                self._host.caveats.say(
                    "another-ranks-order",
                    "the order of the data is drawn again, because another rank saved the generator of the old one",
                )
        while not this.done:
            self._proceed()
            with this.fetching(self._host.caveats):
                batch = next(iterator, END)
            if batch is END:
                break
            if saved is not None and this.count == saved["count"] > 0 and is_enumerated(itself[0]()):
                self._host.doubt(
                    f"the loop continues with batch {this.count} of an epoch, and enumerate() gives it the number 0: "
                    "use session.batch, the right number"
                )
            self.batch = this.count
            this.gives(batch)
            self._since += 1
            self._host.handed_out()
            # A loop that leaves here breaks, and the next epoch settles it; or it fails at an unknown place.
            yield batch
            del batch  # not kept while the next one is loaded
            if self._stale():
                self._settle()
        this.end()
        if self._again:
            return
        self._proceed()
        if self._stale() or (not self._since and (saved is None or not saved["done"])):
            self._settle()

    def _stale(self) -> bool:
        """Return whether a step was taken since the loop was settled."""
        return self._head != self._host.head_step

    def _settle(self) -> None:
        self._head, self._since = self._host.head_step, 0
        self._position = self._now()
        self._host.settled()

    def _next_epoch(self) -> None:
        # If batches were used since the newest step, as in gradient accumulation, that step stays settled where it was.
        # A run that continues from there uses those batches again.
        whole = not self._since or self._stale()
        if not self._passes and self._stale():
            self._host.caveats.say(
                "epoch-without-batches",
                "steps were taken in an epoch, but no batches from batches(loader): a run that is stopped within "
                "one trains on all of its batches again",
            )
        self.epoch += 1
        self._former, self._passes = self._passes or self._former, []
        self._again = []
        if whole:
            self._settle()

    def _proceed(self) -> None:
        held, self._held = self._held, None
        if held is None:
            return
        if self._repeating:
            self._repeating = False
            self._host.repeated()
        restore_rng(held)

    @property
    def resumed(self) -> bool:
        """Whether the loop has a settled position, of an earlier run or its own."""
        return self._position is not None

    @property
    def between_passes(self) -> bool:
        """Whether all passes have ended."""
        return all(made.done for made in self._passes)

    def position(self, step: int) -> dict[str, Any]:
        """Return the loop's position when it settled at `step`; its current position if it did not settle there."""
        return self._position if self._position is not None and self._head == step else self._now()

    def _now(self) -> dict[str, Any]:
        passes = [{**made.state(), "rank": self._rank} for made in self._passes]
        left = [made.left() for made in self._former] or self._left
        return {"epoch": self.epoch, "begun": self._begun, "passes": passes, "left": left}

    def restore(self, position: Mapping[str, Any] | None, head: int) -> None:
        """Restore `position` of step `head`. The current random numbers are those that follow it."""
        if position is None or self.used:
            return
        self.epoch, self._begun = position["epoch"], position["begun"]
        self._again, self._left = list(position["passes"]), list(position["left"])
        self._position, self._head, self._restored = dict(position), head, head
        self._held = raw()
