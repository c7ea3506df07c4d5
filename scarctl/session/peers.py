"""Define what a session asks of the other ranks that train with it, and answer for a process without others.

`scarctl.distributed.coordinator.Crew` is the other one. A call of these is made by all ranks, in the same order.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.checkpoint.selector import OwnSelector, Selector
from scarctl.config import SessionSettings
from scarctl.daemon.request import Wish
from scarctl.errors import UsageError
from scarctl.recovery.lost import Lost, find_lost, parse_lost, refuse_unmatched
from scarctl.state.extras import Extras
from scarctl.state.identity import Lockstep
from scarctl.state.layout import Layout
from scarctl.state.version import step_of
from scarctl.store import Store, topology_epochs

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Found:
    """What a process can continue from, with all its copies in the arena."""

    version: int
    """Of the newest extras."""
    extras: Extras | None
    exact: bool
    """All its copies, and the extras, are of one commit of the whole state, of the step of `version`."""
    survived: bool
    """Its arena has the state as it was at the last iteration that it finished."""
    distance: float | None
    """Norm of the last known distances of what was live from the copies; None when they are not known."""
    owns: bool = True
    """It has some of the state. If not, `extras` may be None: then `version` is `NEVER`."""
    whole: str = ""
    """The name of that commit."""

    @property
    def step(self) -> int:
        return step_of(self.version)


@dataclass(frozen=True, slots=True)
class GoOn:
    """Where all processes continue."""

    step: int
    extras: Extras | None
    exact: bool
    """The whole state, of all processes, is of `step`."""
    summary: dict[str, Any] | None = None
    """What became of the ranks, for the report; None without ranks."""


class Elsewhere(Protocol):
    """A state that was saved in other parts."""

    layout: Layout
    """Of the part that this process has now."""

    def fill(self, arena: Arena) -> GoOn:
        """Write that part into the arena. Raises NoIntactCopy; then nothing live was changed."""


class Together(Lockstep, Protocol):
    """See the module."""

    def open_store(self, settings: SessionSettings) -> Store:
        """The store, as this process sees it. Raises what `Store.create` raises."""

    def agree(self, call: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """Make the call everywhere; when it fails in one process it has failed in all, and is undone."""

    def selector(self) -> Selector:
        """Return what chooses what a partial checkpoint saves."""

    def begin(self, store: Store) -> None:
        """Note in the store which ranks write to it. Called before a session writes."""

    def holds_earlier_run(self, store: Store) -> bool:
        """Whether the store holds an earlier run."""

    def go_on(self, found: Found | None, store: Store) -> GoOn | None:
        """Agree on the state from which all continue. None: one process at least has no complete state."""

    def completed(self, extras: Extras) -> Extras:
        """Return the extras; what is this rank's own and was never saved, or by another rank, stays as it is now."""

    @property
    def rank(self) -> int:
        """The number of this process among them."""

    @property
    def leads(self) -> bool:
        """Whether this process does what one process does for all."""

    def gather(self, value: object) -> list[Any]:
        """Every process's value, a plain one (`scarctl.state.codec`)."""

    @property
    def several(self) -> bool:
        """Whether other ranks train with this one."""

    @property
    def moved(self) -> bool:
        """Whether the state was saved in other parts than those that these processes have."""

    def elsewhere(self, store: Store, mode: str, snapshot: str | None) -> Elsewhere | None:
        """The state as others than these processes have saved it; None when there is none."""

    def lost_ids(self, lost: Lost, layout: Layout, store: Store) -> NDArray[np.int64]:
        """Which of this process's partitions are meant. Raises UsageError when there is none anywhere."""

    def spread(self) -> None:
        """Send restored live values of this process to the other ranks that hold them as well."""

    def grant(self, wishes: deque[Wish], selector: Selector, *, regular: bool) -> Wish | None:
        """The wish that all processes fulfil now, after the same step. regular: a regular checkpoint is due."""

    def rescue(self, store: Store, step: int, extras: Callable[[], Extras], whole: str) -> None:
        """Something has gone wrong, and this process has saved its state of `step`: do what can be done for others.

        extras: of the step. whole: the name of the state, "" when it has none.
        Called when nothing changes the live values. Never raises.
        """

    def close(self) -> None:
        """The session ends. Waits for nobody."""


class WrittenByRanks(UsageError):
    """The store is of several ranks: one of them at least has to go on with it."""


class Alone:
    """A process that trains on its own."""

    moved = several = False
    leads = True
    rank = 0

    def __init__(self) -> None:
        self.start = uuid.uuid4().hex

    def writes(self) -> int:
        """See `Together`. Nobody else has to come to the same name for a state."""
        return 0

    def gather(self, value: object) -> list[Any]:
        """See `Together`."""
        return [value]

    def open_store(self, settings: SessionSettings) -> Store:
        """See `Together`. Raises WrittenByRanks."""
        store = Store.create(settings.store, **settings.fixed(), **settings.place())
        if topology_epochs(store):
            store.close()
            raise WrittenByRanks(
                f"{store.url} is written by several ranks",
                hint="leave out ranks=False, or use another store",
                kind="store-of-ranks",
            )
        return store

    def agree(self, call: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """See `Together`."""
        return call()

    def selector(self) -> Selector:
        """See `Together`."""
        return OwnSelector()

    def begin(self, store: Store) -> None:
        """See `Together`."""

    def holds_earlier_run(self, store: Store) -> bool:
        """See `Together`."""
        return store.current_layout() is not None

    def go_on(self, found: Found | None, store: Store) -> GoOn | None:
        """See `Together`."""
        return None if found is None else GoOn(found.step, found.extras, found.exact)

    def completed(self, extras: Extras) -> Extras:
        """See `Together`."""
        return extras

    def elsewhere(self, store: Store, mode: str, snapshot: str | None) -> Elsewhere | None:
        """See `Together`."""
        return None

    def lost_ids(self, lost: Lost, layout: Layout, store: Store) -> NDArray[np.int64]:
        """See `Together`."""
        names = [group.name for group in layout.groups]
        items = parse_lost(lost, names, range(store.settings.shards))
        ids, unmatched = find_lost(items, layout, store.shard_of(layout), self.rank)
        refuse_unmatched([unmatched], names)
        return ids

    def spread(self) -> None:
        """See `Together`."""

    def grant(self, wishes: deque[Wish], selector: Selector, *, regular: bool) -> Wish | None:
        """See `Together`."""
        return wishes.popleft() if wishes else None

    def rescue(self, store: Store, step: int, extras: Callable[[], Extras], whole: str) -> None:
        """See `Together`."""

    def close(self) -> None:
        """See `Together`."""
