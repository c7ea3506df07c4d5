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
_WITHIN = (
    "session.batches() is read within another one, and steps are taken there: which batch of the outer one was in use "
    "is not saved, and a run that resumes continues with its next one. Read the outer data without session.batches()"
)
_WITHIN_OWN = (
    "session.batches() is read within an iteration, and its data have a random generator of their own, whose state is "
    "not saved there: give the loader none, or put the generator into extras"
)
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

    def continues(self) -> None:
        """Note that the loop is about to continue after a resume."""

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
        self._exhausted = 0
        """Most epochs of an `epochs` that has ended."""
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
        self._given = self._most = 0
        """The session's step when a batch was last handed out, and most steps with one batch."""
        self._restored: int | None = None
        """The step from which the loop resumed."""
        self._workers: dict[int, Rng] = {}
        """Random numbers with which persistent workers were started, by id of their loader."""

    def epochs(self, count: int) -> Iterator[int]:
        """See `Session.epochs`."""
        self.used = self._counted = True
        if count <= self._exhausted:
            self._host.caveats.say(
                "no-epochs-left",
                f"session.epochs({count}) has no epochs left: it counts the epochs of the whole run. In a second phase "
                f"pass the sum, session.epochs({self._exhausted + count})",
                inexact=False,
            )
        if self._held is not None:
            self._host.continues()
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
        self._exhausted = max(self._exhausted, count)
        if not self._again:  # the interrupted epoch may be one of a later phase's
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
        if self._held is not None and not self._counted:
            self._host.continues()
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
        self._forget_repeated()
        saved = self._again.pop(0) if self._again else None
        this = Pass(loader, self._workers)
        outer = self._outer(this)
        this.nested = outer is not None and saved is None and (self._stale() or outer.count > 1)
        number = len(self._passes)
        unknown = saved is None and id(loader) not in self._known and number < len(self._left)
        if this.nested:
            if this.draws:
                self._host.caveats.say("nested-generators", _WITHIN_OWN)
        elif unknown and not leave(loader, self._left[number]):
            self._host.doubt(_OTHERS)
        self._known.add(id(loader))
        if saved is None:
            for made in self._passes:
                if made.abandoned and not this.nested:
                    made.end()  # the loop does not come back to it in this epoch
            if self._stale() and not this.nested:
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
            head = self._host.head_step
            if not this.nested:
                self._given = head
            try:
                yield batch
            except GeneratorExit:
                this.abandoned = True
                if this.nested:
                    self._passes.remove(this)
                raise
            del batch  # not kept while the next one is loaded
            self._most = max(self._most, self._host.head_step - head)
            if not self._stale():
                continue
            if self._outer(this) is None:
                self._settle()
            elif head != self._host.head_step:
                self._host.caveats.say("nested-batches", _WITHIN)
                self._settle()
        this.end()
        if this.nested:
            # Such as a validation: the loop is not done with its step before it requests the outer pass's next batch.
            self._passes.remove(this)
            return
        self._forget_repeated()
        if self._again:
            return
        self._proceed()
        if self._stale() or (not self._since and (saved is None or not saved["done"])):
            self._settle()

    def _outer(self, this: Pass) -> Pass | None:
        """Return the pass of which the loop uses a batch while it reads `this` one; None without one."""
        for other in self._passes:
            if other is this:
                break
            if other.count and not (other.done or other.abandoned):
                return other
        return None

    def _forget_repeated(self) -> None:
        """Forget saved passes that were not repeated before a step: the loop does not come to them again."""
        if self._again and self._host.head_step != self._restored:
            self._again = []

    def iterators(self) -> set[int] | None:
        """Return the ids of the iterators over DataLoaders that it reads; None if it reads other data, too."""
        found = {made.reads() for made in self._passes if not (made.done or made.abandoned)}
        return None if None in found or not found else {one for one in found if one is not None}

    @property
    def in_use(self) -> bool:
        """Whether the loop has received a batch since it settled."""
        return bool(self._since)

    @property
    def usual(self) -> bool:
        """Whether it has taken as many steps with the newest batch as with any other."""
        return self._host.head_step - self._given >= self._most

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
