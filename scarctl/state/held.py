"""Say what one place has of a run's state, and how old that is: the same words wherever a state is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scarctl.state.version import step_of
from scarctl.util.arrays import Ids
from scarctl.util.text import counted, span

MEMORY = "this host's memory"
STORE = "the store"


@dataclass(frozen=True, slots=True)
class Held:
    """The copies of a state in one place."""

    oldest: int
    """Step of the oldest copy; -1: a partition has none."""
    newest: int
    """Step of the newest copy; -1: there is none."""
    seconds: float | None = None
    """Seconds since the newest copy's checkpoint; None if that is unknown."""

    @classmethod
    def of(cls, steps: Ids, seconds: float | None) -> Held:
        """Return what copies of these steps, int64 with -1 for none, amount to."""
        return cls(int(steps.min()), int(steps.max()), seconds) if steps.size else cls(-1, -1, seconds)

    @classmethod
    def of_versions(cls, versions: Ids, seconds: float | None) -> Held:
        """Return what copies of these versions amount to."""
        return cls.of(step_of(versions), seconds)

    def told(self, head: int, *, least: bool = False) -> str:
        """Return the step and the age, in iterations and in seconds, in words.

        head: iterations that the run has finished. least: it may have finished more.
        """
        if self.newest < 0:
            return "nothing"
        if self.oldest < 0:
            return f"copies of some parts, up to step {self.newest}"
        age = "at least " * least + counted(max(0, head - self.oldest), "iteration")
        seconds = None if self.seconds is None else span(self.seconds)
        if self.oldest == self.newest:
            return f"step {self.newest}, of one step, {age}{f' and {seconds}' if seconds else ''} old"
        newest = f", the newest {seconds}" if seconds else ""
        return f"copies of steps {self.oldest} to {self.newest}, up to {age} old{newest}"


def told_places(places: Mapping[str, Held | None], head: int, *, least: bool = False) -> str:
    """Return what every place has in one line: "the store has step 96, of one step, 24 iterations and 14 s old".

    places: by name; None for those that are not known. head, least: see `Held.told`.
    """
    known = ((name, held) for name, held in places.items() if held is not None)
    return "; ".join(f"{name} has {held.told(head, least=least)}" for name, held in known)
