"""Ask the other ranks that train with this process, and answer for a process that trains alone."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.checkpoint.selector import Selector
from scarctl.config import SessionSettings
from scarctl.errors import UsageError
from scarctl.persist.saver import Saver
from scarctl.recovery.label import NO_COMMIT
from scarctl.state.caveats import Caveats
from scarctl.state.extras import Extras
from scarctl.state.label import Label
from scarctl.state.layout import Layout
from scarctl.state.version import step_of
from scarctl.store import Store, topology_epochs
from scarctl.store.topology import refuse_members

if TYPE_CHECKING:
    from scarctl.daemon.request import Request
    from scarctl.recovery.lost import Lost

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Found:
    """A state from which a process can continue, with all its copies in the arena."""

    version: int
    """Version of the newest extras."""
    extras: Extras | None
    survived: bool
    """Its arena has the state of the last iteration that it finished."""
    distance: float | None
    """Norm of the last known distances of live values from the copies; None if unknown."""
    owns: bool = True
    """The process owns rows of the state. If not, `extras` may be None: then `version` is `NEVER`."""
    whole: str = ""
    """Name of the commit of the whole state, of the step of `version`, that has all its copies and extras; or ""."""
    head: int | None = None
    """The last iteration that its arena knows to be finished; None if it had no copies."""

    @property
    def step(self) -> int:
        return step_of(self.version)


@dataclass(frozen=True, slots=True)
class AgreedState:
    """The state from which all processes continue."""

    step: int
    extras: Extras | None
    label: Label
    """The label of the whole state, of all processes. If their arenas have it, the steps are that of the extras."""
    summary: dict[str, Any] | None = None
    """Lost ranks and the predicted cost, for the report; None without ranks."""


class Elsewhere(Protocol):
    """A state that was saved under another division among processes."""

    layout: Layout
    """Layout of this process's share."""

    def fill(self, arena: Arena) -> AgreedState:
        """Write this process's share into the arena. Raises NoIntactCopy, with no live value changed."""


def refuse_peers(settings: SessionSettings) -> None:
    """Raise UsageError if other hosts are to keep copies: a process without ranks knows no other host."""
    if settings.peers:
        raise UsageError(
            f"peers={settings.peers}: a process that trains alone has no peers",
            hint="leave it out, or train with several ranks of torch.distributed, or with members",
        )


def check_wait(wait: object, settings: SessionSettings) -> None:
    """Raise UsageError unless `Session.checkpoint` can wait in this way."""
    if wait == "peers" and not settings.peers:
        raise UsageError(
            "wait='peers', but no other host keeps copies of this one's memory",
            hint="attach with Settings(peers=1), or use wait=True to wait for the store",
        )
    if wait not in (True, False, "peers"):
        raise UsageError(f"wait is {wait!r:.80}", hint='give True, False or "peers"')


class WrittenByRanks(UsageError):
    """The store is written by several ranks, so that a single process cannot use it."""


class Together:
    """A session's questions to all processes that train together, and the answers of a process that trains alone.

    `scarctl.distributed.coordinator.RankCoordinator` answers them for several ranks, and
    `scarctl.distributed.members.Membership` for a process that shares only the store. All ranks make these calls in the
    same order.
    """

    rank = 0
    """The number of this process."""
    start: str
    """See `scarctl.state.identity.Lockstep`."""
    moved = False
    """Whether the state in the store was saved under another division than that of these processes."""
    brought = False
    """Whether this process's arena was brought from another host when it started."""

    def __init__(self) -> None:
        self.start = uuid.uuid4().hex

    @property
    def leads(self) -> bool:
        """Whether this process does the work that one process does for all."""
        return self.rank == 0 or not self.several

    @property
    def several(self) -> bool:
        """Whether other ranks train with this one."""
        return False

    def gather(self, value: object) -> list[Any]:
        """Return the values of all processes, by rank: plain values, as in `scarctl.state.codec`."""
        return [value]

    def agree(self, call: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """Make the call in all processes. If it fails in one, undo it and raise in all."""
        return call()

    def collect(self, call: Callable[[], object]) -> list[Any]:
        """Make the call in all processes as `agree` does, and return the results of all as `gather` does."""
        return [call()]

    def writes(self) -> int:
        """See `scarctl.state.identity.Lockstep`. Always 0 alone: no other process computes the name of a state."""
        return 0

    def common(self) -> Callable[[], Mapping[str, str]]:
        """See `scarctl.state.identity.Lockstep`. A process alone has nothing in common with others."""
        return dict

    def open_store(self, settings: SessionSettings) -> Store:
        """Return this process's view of the store. Raises as `Store.create` does.

        Alone it raises WrittenByRanks too, and UsageError if other hosts are to keep copies.
        """
        refuse_peers(settings)
        store = Store.create(settings.store, **settings.fixed(), **settings.place())
        try:
            refuse_members(store)
            if topology_epochs(store):
                raise WrittenByRanks(
                    f"{store.url} is written by several ranks",
                    hint="omit ranks=False, or use another store",
                    kind="store-of-ranks",
                )
        except BaseException:
            store.close()
            raise
        return store

    def selector(self) -> Selector:
        """Return the selector of partitions for partial checkpoints."""
        return Selector()

    def keep_copies(self, saver: Saver, settings: SessionSettings, caveats: Caveats) -> None:
        """Have other hosts keep copies of this process's memory, if the settings say so. Its saver is open.

        A copy that cannot be kept becomes a caveat. Raises Unavailable if a rank is gone.
        """

    def end_copies(self) -> None:
        """End what `keep_copies` has begun in this process, before its saver is closed. The copies stay."""

    def begin(self, store: Store) -> None:
        """Note in the store which ranks write to it. Called before a session writes."""

    def holds_earlier_run(self, store: Store) -> bool:
        """Return whether the store holds an earlier run."""
        return store.current_layout() is not None

    def agree_in_memory(self, arena: Arena) -> None:
        """Make the newest state that all processes have in memory the arena's newest one, if all were killed."""

    def agree_on_state(self, found: Found | None, store: Store) -> AgreedState | None:
        """Agree on the state from which all continue. Return None if a process has no complete state."""
        if found is None:
            return None
        label = Label(found.step, found.step, () if found.whole else (NO_COMMIT,))
        return AgreedState(found.step, found.extras, label)

    def completed(self, extras: Extras) -> Extras:
        """Return the extras. This rank's own values, if never saved or saved by another rank, stay as they are now."""
        return extras

    def elsewhere(self, store: Store, mode: str, snapshot: str | None) -> Elsewhere | None:
        """Return the state that a previous set of processes has saved; None if the store has no such state."""
        return None

    def lost_ids(self, lost: Lost, layout: Layout, store: Store) -> NDArray[np.int64]:
        """Return the partitions of this process that `lost` names. Raises UsageError if no process has any."""
        from scarctl.recovery.lost import find_lost, parse_lost, refuse_unmatched

        names = [group.name for group in layout.groups]
        items = parse_lost(lost, names, range(store.settings.shards))
        ids, unmatched = find_lost(items, layout, store.shard_of(layout), self.rank)
        refuse_unmatched([unmatched], names)
        return ids

    def own_ids(self, lost: Lost, layout: Layout, store: Store) -> NDArray[np.int64]:
        """Return the same without asking other processes: none may be of this one. For any thread."""
        return Together.lost_ids(self, lost, layout, store)

    def spread(self) -> None:
        """Send restored live values of this process to the other ranks that hold them."""

    def grant(self, requests: deque[Request], selector: Selector, *, regular: bool) -> Request | None:
        """Return the request that all processes fulfil after this same step. regular: a regular checkpoint is due."""
        return requests.popleft() if requests else None

    def behind(self, store: Store, step: int) -> bool:
        """Return whether another process of the job on this host has made the step after `step`. It waits a moment."""
        return False

    def rescue(self, store: Store, step: int, extras: Callable[[], Extras], whole: str) -> None:
        """Update the arenas of dead ranks, after a failure, once this process has saved its state of `step`.

        extras: extras of the step.
        whole: the name of the whole state, "" if it has none.

        Live values must not change meanwhile. Never raises.
        """

    def close(self) -> None:
        """End the session's part, without waiting for other processes."""
