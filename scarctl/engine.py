"""Everything a session has once its layout is known: arena, writer, persister, and one checkpoint at a time.

A checkpoint has two halves. `copy` and `seal` run on the worker thread beside the next forward and backward: distances,
selection, live rows into the arena. `hand_over` runs right before the next optimizer step and only writes a
small file; the persister does the rest in the background.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from scarctl.behind import Behind
from scarctl.cadence import Cadence
from scarctl.caveats import Caveats
from scarctl.config import SessionSettings
from scarctl.daemon.handover import HandOverQueue
from scarctl.daemon.kinship import arena_for
from scarctl.daemon.movements import Movements
from scarctl.daemon.persister import adopt_orphans
from scarctl.daemon.saver import Saver
from scarctl.errors import ScarError
from scarctl.layout import Layout
from scarctl.live import LiveState
from scarctl.motion import Motion
from scarctl.pinning import Pinning
from scarctl.policy import Selection, select, squared
from scarctl.recovery import Plan
from scarctl.store import Store
from scarctl.tracker import Tracker
from scarctl.trend import Trend
from scarctl.version import NEVER, pack, step_of

log = logging.getLogger("scarctl")
Ids = NDArray[np.int64]
_NONE = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Copied:
    """What one checkpoint put into the arena."""

    version: int
    """Of all its copies. Taken once: the epoch changes when the daemon is replaced meanwhile."""
    ids: Ids
    sealed: bool
    """Every partition of the state is of this version: copied now, or equal to its newest copy."""
    nonfinite: Ids = field(default_factory=_NONE.copy)
    """Partitions left out because their values are not finite: the last good copy is kept."""

    @property
    def step(self) -> int:
        return step_of(self.version)


class Selector(Protocol):
    """Chooses what a partial checkpoint saves. `policy.select` does it for one session; ranks do it together.

    Of a regular checkpoint other ranks may wait for word: it is expected, and settled when it has ended.
    """

    wish: int
    """What this process wants all others to know."""
    proposed: int
    """Iterations between regular checkpoints that this process would leave; the largest wins."""
    interval: int
    """The interval that `agreed` has learnt; 0: nothing new."""

    def agreed(self) -> int:
        """What some process wanted them all to know, a while ago; to be asked before each `expect`."""

    def expect(self, step: int, budget: int) -> None:
        """A regular checkpoint of `step` is due; budget: bytes."""

    def hurry(self) -> None:
        """The training thread has begun to wait for the copy. Called in that thread."""

    def settle(self) -> None:
        """The copy has ended, or there was none."""

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
        """See `policy.select`. Called in the worker thread."""

    def close(self) -> None:
        """Called in the training thread, after the last copy has ended."""


class _OneSession:
    """Nobody else to ask."""

    wish = proposed = interval = 0

    def agreed(self) -> int:
        return 0

    def expect(self, step: int, budget: int) -> None: ...

    def hurry(self) -> None: ...

    def settle(self) -> None: ...

    def close(self) -> None: ...

    select = staticmethod(select)


class Engine:
    """The saving side of a session. One checkpoint is under way at a time."""

    def __init__(
        self,
        store: Store,
        layout: Layout,
        settings: SessionSettings,
        folder: Path,
        saver: Saver,
        *,
        stopped: bool = False,
        selector: Selector | None = None,
        caveats: Caveats | None = None,
    ) -> None:
        """Open or create the arena in `folder`, and start saving: a new epoch.

        stopped: write nothing to the store until `saver.resume()`. selector: instead of `policy.select`.
        caveats: where it is said that the store is behind.

        Raises Contention, Unavailable (arena or store is full), AccessDenied, Corruption.
        """
        self.store = store
        self.layout = layout
        self.settings = settings
        self.saver = saver
        self.shard_of = store.shard_of(layout)
        self.budget = max(1, int(settings.fraction * layout.nbytes))
        self.selector: Selector = selector or _OneSession()
        self.tracker = Tracker(
            layout, settings.tracker, settings.norm, store.settings.seed, budget=self.budget
        )
        self.credit = 0
        self.cursor = 0
        self.motion = Motion(layout)
        self.trend = Trend(layout) if settings.extrapolate else None
        self.cadence = Cadence(
            None if settings.interval == "auto" else settings.interval,
            checkpoint_bytes=layout.nbytes if settings.policy == "full" else self.budget,
            max_bandwidth=settings.max_bandwidth,
            divisible=settings.policy != "full" and selector is None,
            shared=selector is not None,
        )
        self.arena = arena_for(folder, layout, store)
        self.pinning = Pinning(self.arena.memory())
        self.queue = HandOverQueue(self.arena.folder)
        self._sealing: int | None = None
        """Number of the newest hand-over that seals the state, until it is known to be durable."""
        self._due_at = -1
        """The step of the newest regular checkpoint."""
        self._orphaned = False
        """Copies could not be queued: to be tried again."""
        self._behind = Behind(
            self.arena,
            self.cadence,
            settings,
            int(np.unique(self.shard_of).size),
            layout.nbytes if settings.policy == "full" else self.budget,
            caveats if caveats is not None else Caveats(),
        )
        self.movements: Movements | None = None
        try:
            if self.trend is not None:
                self.movements = self._open_movements(self.trend.groups)
            before = self.arena.version.copy()
            saver.open(self.arena, stopped=stopped)
            if self.movements is not None:
                self.movements.relabel(before, self.arena.version)
        except BaseException:
            self.selector.close()
            self.arena.close()
            raise

    def _open_movements(self, groups: Collection[int]) -> Movements:
        try:
            return Movements(self.arena.folder, self.layout, groups)
        except ScarError:
            if not (self.arena.version >= 0).any():
                self.arena.remove()  # nothing is in it yet: it must not keep the memory that there is too little of
            raise

    def copy(self, live: LiveState, step: int) -> Copied:
        """One partial checkpoint: pick at most the budget and copy it into the arena."""
        version = pack(self.arena.epoch, step)
        self._look(live, step)
        distance = self.tracker.distances(live, step)
        pending = self.arena.pending()
        self._behind.look(pending, step, self.saver)
        chosen = self.selector.select(
            self.settings.policy,
            distance_sq=squared(distance),
            nbytes=self.layout.partition_bytes,
            staleness=self._staleness(step),
            eligible=self._eligible(pending),
            budget=self.budget_now,
            credit=self.credit,
            cursor=self.cursor,
            seed=self.store.settings.seed,
            step=step,
            max_staleness=self.settings.max_staleness,
        )
        self.credit, self.cursor = chosen.credit, chosen.cursor
        # Estimates have not seen every value of what they choose.
        ids, bad = self.tracker.check(live, chosen.ids, distance)
        self._save(live, ids, distance, version)
        return Copied(version, ids, ids.size == self.layout.partitions, np.union1d(chosen.nonfinite, bad))

    @property
    def may_copy(self) -> bool:
        """Whether there is something that a partial checkpoint may copy, if it has changed."""
        try:
            return not self._is_sealing() and not self.arena.pending().all()
        except ScarError:
            return True  # the checkpoint will meet the same fault, and report it

    def _eligible(self, pending: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """What a partial checkpoint may copy: what does not wait for the store, and nothing while a seal does."""
        return np.zeros_like(pending) if self._is_sealing() else ~pending

    def _is_sealing(self) -> bool:
        """Whether a sealed state is on its way to the store.

        What it has found as it was saved does not wait, and with a newer copy of that the state would not be of one
        step any more.
        """
        # A daemon that takes over gives what waits other numbers, which are larger; nothing else comes after a seal.
        if self._sealing is not None and max(self.queue.numbers(), default=-1) < self._sealing:
            self._sealing = None
        return self._sealing is not None

    def _staleness(self, step: int) -> Ids:
        """Iterations since every copy; zeros where nobody asks, for it takes longer than all else of a selection."""
        if self.settings.max_staleness is None and self.settings.policy == "priority":
            return np.broadcast_to(np.int64(0), self.layout.partitions)
        return np.maximum(step - step_of(self.arena.newest()), 0)

    @property
    def budget_now(self) -> int:
        """Bytes that a partial checkpoint may take, without credit."""
        return max(1, int(self.budget * self.cadence.share))

    def seal(self, live: LiveState, step: int, *, skip_if_behind: bool = False) -> Copied:
        """A checkpoint after which every partition is of `step`: copies all that differ from their last copy.

        skip_if_behind: copy nothing while an earlier copy still waits for the store; else it is overtaken, and a
        store that is always behind would never see a whole state.

        What is not finite is left out, and then the state is not sealed. The very first checkpoint takes everything:
        it is the running checkpoint's x(0) (Qiao et al., section 4.2).
        """
        version = pack(self.arena.epoch, step)
        self._look(live, step)
        first = not (self.arena.version >= 0).any()
        if first:
            distance = np.zeros(self.layout.partitions)
            ids, nonfinite = np.arange(self.layout.partitions), _NONE
        elif skip_if_behind and (pending := self.arena.pending()).any():
            self._behind.look(pending, step, self.saver)
            return Copied(version, _NONE, sealed=False)
        else:
            distance = live.distances(self.settings.norm)
            # A spoiled copy is none, also where its bytes happen to be right.
            changed = live.changed() | ~self.arena.intact()
            good = np.isfinite(distance)
            ids, nonfinite = np.flatnonzero(changed & good), np.flatnonzero(changed & ~good)
        self._save(live, ids, distance, version, sealed=not nonfinite.size)
        self.tracker.saved_all(but=nonfinite)
        return Copied(version, ids, sealed=not nonfinite.size, nonfinite=nonfinite)

    def _look(self, live: LiveState, step: int) -> None:
        # Not when somebody has asked for a checkpoint: all ranks have to look after the same iterations.
        if step == self._due_at:
            self.motion.look(live.tensors, step)
        if self.trend is not None:
            self.trend.look(live.tensors, step)

    def _save(
        self,
        live: LiveState,
        ids: Ids,
        distance: NDArray[np.float64],
        version: int,
        *,
        sealed: bool = False,
    ) -> None:
        live.save(ids, version, self.movements)
        if self.trend is not None:
            self.trend.saved(ids, step_of(version), sealed=sealed)
        self.arena.distance[:] = distance
        self.equal(ids)

    def equal(self, ids: Ids) -> None:
        """Live values of these partitions are what the arena has."""
        self.arena.distance[ids] = 0.0
        self.tracker.saved(ids)

    def moved(self, live: LiveState, ids: Ids) -> None:
        """Live values of these partitions (ascending) were changed by no step: they are not what the arena has."""
        self.arena.distance[ids] = live.distances_at(ids, self.settings.norm)
        self.tracker.moved(ids)

    def spoil(self, ids: Ids) -> None:
        """The copies of these partitions are no good."""
        self.arena.spoil(ids)
        self.tracker.moved(ids)

    def copy_again(self, live: LiveState, copied: Copied, g: int) -> Copied:
        """Copy what was copied of group `g` once more. What is not finite by now has no good copy of this step."""
        mine = (copied.ids >= self.layout.base[g]) & (copied.ids < self.layout.base[g + 1])
        finite = np.ones(mine.size, dtype=bool)
        finite[mine] = np.isfinite(live.distances_at(copied.ids[mine], self.settings.norm))
        live.save(copied.ids[mine & finite], copied.version)
        bad = copied.ids[~finite]
        if not bad.size:
            return copied
        self.spoil(bad)
        return Copied(
            copied.version,
            copied.ids[finite],
            sealed=False,
            nonfinite=np.union1d(copied.nonfinite, bad),
        )

    def hand_over(self, copied: Copied, extras: Any, whole: str = "") -> None:
        """Queue what was copied, sealed if it is called `whole`. Returns at once: the queue is in the arena."""
        self.arena.whole = whole or self.arena.whole  # before the persister looks
        number = self.queue.put(version=copied.version, ids=copied.ids, whole=whole, extras=extras)
        self._sealing = number if whole else self._sealing
        nbytes = int(self.layout.partition_bytes[copied.ids].sum())
        self.cadence.handed_over(time.monotonic(), number, nbytes)
        self.saver.notify()

    def due(self, step: int) -> bool:
        """Whether a partial checkpoint is due, to be asked after every iteration; `step`: iterations finished."""
        try:
            waiting: Collection[int] = self.queue.numbers() if self.settings.interval == "auto" else []
        except ScarError:
            if not self.cadence.shared:
                return True  # the checkpoint will meet the same fault, and report it
            waiting = self.cadence.waiting
        due = self.cadence.due(time.monotonic(), step, waiting)
        self.selector.proposed = self.cadence.proposed
        if due:
            self._due_at = step
        return due

    def is_sealed(self) -> bool:
        """Whether every copy is of the newest iteration, in the store or on its way there."""
        waiting = [handover.version for handover in self.queue.pending() if handover.sealed]
        head, copies = self.arena.head_step, step_of(self.arena.newest())
        return head in map(step_of, waiting) or bool((copies == head).all())

    def lag(self) -> int:
        """Iterations between now and the oldest copy that the store has not, 0 when it has all."""
        waiting = self.arena.version[self.arena.pending()]
        return max(0, self.arena.head_step - int(step_of(waiting).min())) if waiting.size else 0

    def start_over(self) -> None:
        """Forget what the arena has: it is of a run that never got as far as a whole checkpoint.

        To be called while nothing is saved.
        """
        self.queue.clear()
        self.arena.reset()
        if self.movements is not None:
            self.movements.gap[:] = 0

    def adopt_orphans(self) -> None:
        """After a fault or a death: what was copied but not handed over would wait for ever.

        Where it cannot be queued now, `adopt_again` does it later.
        """
        self._orphaned = True
        try:
            self.adopt_again()
        except ScarError as error:
            log.error("copies in %s cannot be queued yet: %s", self.arena.folder, error)

    def adopt_again(self) -> None:
        """Queue what could not be queued before, if there is something. Raises Unavailable: it still cannot."""
        if self._orphaned:
            adopt_orphans(self.arena, self.queue)
            self._orphaned = False
            self.saver.notify()

    @contextmanager
    def nothing_saved(self) -> Iterator[None]:
        """Inside, nothing is written to the store; what is queued stays queued."""
        self.saver.stop()
        try:
            yield
        finally:
            self.saver.resume()

    def forget_after(self, plan: Plan) -> None:
        """Make the sealed state of `plan`, which the arena has now, the newest: here and in the store (a new epoch)."""
        self.saver.roll_back(plan.seqs)
        self.arena.durable[:] = self.arena.version
        self.arena.sealed, self.arena.whole = NEVER, plan.whole

    def leave(self) -> None:
        """Let go at once: what waits becomes durable in the daemon, and the arena stays for the next session."""
        self.selector.close()
        self.saver.leave()
        self.pinning.end()
        self.arena.close()

    def close(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until all is durable, then let go. Returns whether it was.

        A durable arena is removed; otherwise it stays with its queue, and the next session on this host goes on.
        """
        self.selector.close()
        self.pinning.end()
        durable = self.saver.drain(timeout)
        self.saver.close(put_off=not durable)
        durable = durable and not self.arena.pending().any()
        if durable:
            self.queue.clear()
            self.arena.remove()
        else:
            self.arena.close()
        return durable
