"""Track and restore the position of a training loop that reads `Session.epochs` and `Session.batches`.

When the loop requests the next batch or the next epoch, it declares the end of its newest step: everything that belongs
to the step is done, such as schedules and averages. A checkpoint gets the extras and random numbers of that moment, and
the position. The position is the epoch, and for each pass over a loader in that epoch the number of batches handed out.

A resumed loop repeats each pass from the random numbers with which it began, without the used batches. The random
numbers of the declared moment are restored last, right before the first new batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from scarctl.checkpoint.randomness import raw, restore_rng, undisturbed
from scarctl.session.passes import END, Pass, Rng, leave
from scarctl.state.caveats import Caveats

T = TypeVar("T")
_OTHERS = (
    "the data have other random generators than when the run stopped: make them in the constructor, or put them into "
    "extras"
)


class Host(Protocol):
    """What a loop asks of its session."""

    @property
    def caveats(self) -> Caveats:
        """Warnings of the session."""

    @property
    def head_step(self) -> int:
        """Iterations finished."""


class Loop:
    """The epochs and batches of one session."""

    def __init__(self, host: Host, rank: int) -> None:
        self._host = host
        self._rank = rank
        self.ended: Callable[[], None] = lambda: None
        """Called when the loop declares that the newest step has ended."""
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
        self._left: list[Mapping[str, Any]] = []
        """State of the loaders at the end of the previous epoch, by number of their passes."""
        self._known: set[int] = set()
        """Ids of loaders whose state this process knows."""
        self._again: list[Mapping[str, Any]] = []
        """Passes of this epoch that a resumed loop must still repeat."""
        self._held: Rng | None = None
        """Random numbers with which a resumed loop will continue, until it does."""
        self.newest: dict[str, Any] | None = None
        """Position of the newest declared moment."""
        self.head = 0
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
        if count <= self._exhausted:
            self._host.caveats.say(
                "no-epochs-left",
                f"session.epochs({count}) has no epochs left: it counts the epochs of the whole run. In a second phase "
                f"pass the sum, session.epochs({self._exhausted + count})",
            )
        for epoch in range(self.epoch, count):
            if self._again and self._begun is not None:
                # The loop's draws before its first pass are repeated.
                restore_rng(self._begun)
            else:
                self._proceed()
                self._begun = raw()
            yield epoch
            if self.epoch == epoch:
                self._next_epoch()
        self._exhausted = max(self._exhausted, count)
        if not self._again:  # the interrupted epoch may be one of a later phase's
            self._proceed()

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """See `Session.batches`."""
        self.used = True
        if not self._counted and self._passes and not self._again and all(made.done for made in self._passes):
            self._next_epoch()  # without `epochs` each pass is one
        self._forget_repeated()
        saved = self._again.pop(0) if self._again else None
        outer = self._outer()
        if outer is not None and saved is None and (self.stale or outer.count > 1):
            # Such as a validation: the loop is not done with its step before it requests the outer pass's next batch.
            yield from loader
            return
        this = Pass(loader, self._rank, self._workers)
        if saved is None:
            for made in self._passes:
                made.done = made.done or made.abandoned  # the loop does not come back to it in this epoch
            if self.stale:
                self.declare()
            self._proceed()
            self._continue_loader(loader)
            self._passes.append(this)
            iterator = this.begin(self._host.caveats)
        else:
            self._known.add(id(loader))
            self._passes.append(this)
            iterator = self._repeat(this, saved)
        while not this.done:
            if self._held is not None:
                self._proceed()
            batch = this.fetch(iterator)
            if batch is END:
                break
            self.batch = this.count - 1
            self._since += 1
            try:
                yield batch
            except GeneratorExit:
                this.abandoned = True
                raise
            del batch  # not kept while the next one is loaded
            if self.head != self._host.head_step:
                self.declare()
        self._forget_repeated()
        if self._again:
            return
        self._proceed()
        if self.stale or not (self._since or (saved is not None and saved["done"])):
            self.declare()

    def _continue_loader(self, loader: Any) -> None:
        """Set a loader that this process reads first to the state in which the previous epoch left it."""
        number = len(self._passes)
        if (
            id(loader) not in self._known
            and number < len(self._left)
            and not leave(loader, self._left[number])
        ):
            self._host.caveats.say("other-generators", _OTHERS)
        self._known.add(id(loader))

    def _repeat(self, this: Pass, saved: Mapping[str, Any]) -> Iterator[Any]:
        same = bool(self._rank == saved["rank"])
        with undisturbed():
            iterator = this.begin_again(saved, same_rank=same)
        if this.others:
            self._host.caveats.say("other-generators", _OTHERS)
        if not same:
            self._host.caveats.say(
                "another-ranks-order",
                "the order of the data is drawn again, because another rank saved the generator of the old one",
            )
        return iterator

    def _outer(self) -> Pass | None:
        """Return the pass of which the loop uses a batch; None without one."""
        for other in self._passes:
            if other.count and not (other.done or other.abandoned):
                return other
        return None

    def _forget_repeated(self) -> None:
        """Forget saved passes that were not repeated before a step: the loop does not come to them again."""
        if self._again and self._host.head_step != self._restored:
            self._again = []

    @property
    def stale(self) -> bool:
        """Whether a step was taken since the newest declared moment."""
        return self.head != self._host.head_step

    @property
    def in_use(self) -> bool:
        """Whether the loop has begun the next iteration: it has a new batch, and took no step with it."""
        return bool(self._since) and not self.stale

    def declare(self) -> None:
        """Declare that the newest step has ended, with the batches handed out so far."""
        self.head, self._since = self._host.head_step, 0
        passes = []
        for made in self._passes:
            passes.append(made.state())
        self.newest = {"epoch": self.epoch, "begun": self._begun, "passes": passes, "left": self._left}
        self.ended()

    def _next_epoch(self) -> None:
        # If batches were used since the newest step, as in gradient accumulation, that step stays declared where it
        # was. A run that continues from there uses those batches again.
        whole = not self._since or self.stale
        self.epoch += 1
        if self._passes:
            self._left, self._passes = [made.left() for made in self._passes], []
        self._again = []
        if whole:
            self.declare()

    def _proceed(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            restore_rng(held)

    def position(self) -> dict[str, Any]:
        """Return the position of the newest declared moment; the current one if a step was taken since."""
        if self.newest is None or self.head != self._host.head_step:
            return self._now()
        return self.newest

    def _now(self) -> dict[str, Any]:
        passes = [made.state() for made in self._passes]
        return {"epoch": self.epoch, "begun": self._begun, "passes": passes, "left": self._left}

    def restore(self, position: Mapping[str, Any] | None, head: int) -> None:
        """Restore `position` of step `head`. The current random numbers are those that follow it."""
        self.head = head
        if position is None or self.used:
            return
        self.epoch, self._begun = position["epoch"], position["begun"]
        self._again, self._left = list(position["passes"]), list(position["left"])
        self.newest, self._restored = dict(position), head
        self._held = raw()
