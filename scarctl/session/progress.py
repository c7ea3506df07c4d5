"""Count the steps of one session's loop, and say which of their ends the loop declares."""

from __future__ import annotations

from collections.abc import Iterable

from scarctl.session.loop import Loop
from scarctl.state.caveats import Caveat, Caveats
from scarctl.state.common import MIXED
from scarctl.state.extras import Extras

UNKNOWN = (
    "the position in the data is not saved, because this loop does not declare where a step ends. To declare it: "
    "`for epoch in session.epochs(n):` and in it `for batch in session.batches(loader):`"
)
_SINCE = "it was restored like this, and no step has ended since: "


class Progress:
    """The progress of one session's loop, which is the `Host` of its `Loop`."""

    def __init__(self, caveats: Caveats, rank: int, *, hooked: bool) -> None:
        """Begin before the first step. hooked: whether hooks report the ends of steps, and not the loop."""
        self.head_step = 0
        """Iterations finished."""
        self.caveats = caveats
        self.owned = not hooked
        """Whether the loop, or a framework that owns it, declares the ends of steps without `batches`."""
        self.loop = Loop(self, rank)
        self._mixed: Caveat | None = None
        """What to say of the state after step `_restored`; None if it was not mixed."""
        self._restored = 0

    @property
    def declares(self) -> bool:
        """Whether the loop declares the ends of its steps."""
        return self.owned or self.loop.used

    def declare(self) -> None:
        """Declare the end of the newest step for the loop, which is between two iterations."""
        if self.loop.used and self.loop.stale:
            self.loop.declare()

    def restore(self, extras: Extras | None, step: int) -> None:
        """Continue after `step`, with these extras. None: nothing was saved."""
        self.head_step = self._restored = step
        saved = () if extras is None else extras.notes.caveats
        self._mixed = next((caveat for caveat in saved if caveat.kind == MIXED), None)
        self.loop.restore(None if extras is None else extras.loop, step)

    def mixed(self, reasons: Iterable[str]) -> None:
        """Note that the newest step's state is mixed, as a resume restored it. So it stays until a step has ended."""
        self._restored = self.head_step
        self._mixed = Caveat(MIXED, _SINCE + "; ".join(reason.removeprefix(_SINCE) for reason in reasons))

    def caveats_at(self, step: int) -> tuple[Caveat, ...]:
        """Return the caveats to save with the state after `step`."""
        if self._mixed is None or step != self._restored:
            return tuple(self.caveats)
        return (*self.caveats, self._mixed)
