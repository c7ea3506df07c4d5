"""Save one session's state: everything that a session has once its layout is known.

A checkpoint has two halves. `copy` runs on the worker thread, during the next forward and backward: distances,
selection, live rows into the arena. `hand_over` runs right before the next optimizer step and only writes a small
file; the persister does the rest in the background.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.arena.kinship import arena_for
from scarctl.arena.movements import Movements
from scarctl.arena.queue import HandOverQueue
from scarctl.checkpoint.behind import Behind
from scarctl.checkpoint.copied import Copied, Extent
from scarctl.checkpoint.copies import Copies
from scarctl.checkpoint.live_state import LiveState
from scarctl.checkpoint.motion import Motion
from scarctl.checkpoint.pinning import Pinning
from scarctl.checkpoint.selector import Selector
from scarctl.checkpoint.tracker import Tracker
from scarctl.checkpoint.trend import Trend
from scarctl.config import SessionSettings
from scarctl.errors import ScarError
from scarctl.persist.persister import adopt_orphans
from scarctl.persist.saver import Saver
from scarctl.persist.thread import Current
from scarctl.policy.interval import Cadence
from scarctl.policy.select import squared
from scarctl.recovery.plan import Plan
from scarctl.state.caveats import Caveat, Caveats
from scarctl.state.extras import Extras, Notes, PolicyMemory
from scarctl.state.layout import Layout
from scarctl.state.version import pack, step_of
from scarctl.store import Store
from scarctl.theory.history import History
from scarctl.util.arrays import Ids

log = logging.getLogger("scarctl")
_NONE = np.empty(0, dtype=np.int64)


class Engine:
    """The saving side of a session. One checkpoint is under way at a time. Nothing is saved before `start`."""

    def __init__(
        self,
        store: Store,
        layout: Layout,
        settings: SessionSettings,
        folder: Path,
        saver: Saver,
        *,
        selector: Selector,
        caveats: Caveats,
    ) -> None:
        """Open or create the arena in `folder`, and begin a new epoch.

        selector: chooses what a partial checkpoint saves. caveats: to which is added that the store is behind.

        Raises Contention, Unavailable (arena or store is full), AccessDenied, Corruption.
        """
        self.store = store
        self.layout = layout
        self.settings = settings
        self.saver = saver
        self.shard_of = store.shard_of(layout)
        self.budget = max(1, int(settings.fraction * layout.nbytes))
        self.selector = selector
        self.tracker = Tracker(
            layout, settings.tracker, settings.norm, store.settings.seed, budget=self.budget
        )
        self.policy_memory = PolicyMemory()
        self.motion = Motion(layout)
        self.trend = Trend(layout) if settings.extrapolate else None
        self.cadence = Cadence(
            None if settings.interval == "auto" else settings.interval,
            checkpoint_bytes=layout.nbytes if settings.policy == "full" else self.budget,
            max_bandwidth=settings.max_bandwidth,
            divisible=settings.policy != "full" and not selector.shared,
            shared=selector.shared,
        )
        self.arena = arena_for(folder, layout, store)
        self.pinning = Pinning(self.arena.memory())
        self.queue = HandOverQueue(self.arena.folder)
        self.copies = Copies(self.arena, self.queue, store, self.shard_of)
        self._sealing: int | None = None
        """Number of the newest hand-over that seals the state; None once it is known to be durable."""
        self._due_at = -1
        """The step of the newest regular checkpoint."""
        self._orphaned = False
        """Copies could not be queued, and have to be queued later."""
        self._behind = Behind(
            self.arena,
            self.cadence,
            settings,
            int(np.unique(self.shard_of).size),
            layout.nbytes if settings.policy == "full" else self.budget,
            caveats,
        )
        self.movements: Movements | None = None
        try:
            if self.trend is not None:
                self.movements = self._open_movements(self.trend.groups)
            before = self.arena.version.copy()
            saver.open(self.arena)
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
                self.arena.remove()  # it is empty, and would keep memory that is short already
            raise

    def copy(self, live: LiveState, step: int, extent: Extent) -> Copied:
        """Copy the state as it is after `step`, or a part of it, into the arena. Called in the worker thread."""
        self.tracker.go_on()
        if extent is Extent.PART:
            return self._copy_part(live, step)
        return self._seal(live, step, extent)

    def _copy_part(self, live: LiveState, step: int) -> Copied:
        """Pick at most the budget, and copy it."""
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
            credit=self.policy_memory.credit,
            cursor=self.policy_memory.cursor,
            seed=self.store.settings.seed,
            step=step,
            max_staleness=self.settings.max_staleness,
        )
        self.policy_memory = PolicyMemory(chosen.credit, chosen.cursor)
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
        """Return what a partial checkpoint may copy: what does not wait for the store; nothing while a seal does."""
        return np.zeros_like(pending) if self._is_sealing() else ~pending

    def _is_sealing(self) -> bool:
        """Whether a sealed state is on its way to the store.

        What it has found as it was saved does not wait, and with a newer copy of that the state would not be of one
        step any more.
        """
        # A daemon that takes over gives waiting hand-overs larger numbers, and nothing else comes after a seal.
        if self._sealing is not None and max(self.queue.numbers(), default=-1) < self._sealing:
            self._sealing = None
        return self._sealing is not None

    def _staleness(self, step: int) -> Ids:
        """Return the iterations since every copy; zeros where no policy needs them: they take long to compute."""
        if self.settings.max_staleness is None and self.settings.policy == "priority":
            return np.broadcast_to(np.int64(0), self.layout.partitions)
        return np.maximum(step - step_of(self.arena.newest()), 0)

    @property
    def budget_now(self) -> int:
        """Bytes that a partial checkpoint may take, without credit."""
        return max(1, int(self.budget * self.cadence.share))

    def _seal(self, live: LiveState, step: int, extent: Extent) -> Copied:
        """Copy all that differs from its last copy: every partition is of `step` then.

        What is not finite is left out, and then the state is not sealed. The very first checkpoint takes everything:
        it is the running checkpoint's x(0) (Qiao et al., section 4.2).
        """
        version = pack(self.arena.epoch, step)
        self._look(live, step)
        first = not (self.arena.version >= 0).any()
        if first:
            distance = np.zeros(self.layout.partitions)
            ids, nonfinite = np.arange(self.layout.partitions), _NONE
        elif extent is Extent.WHOLE_UNLESS_BEHIND and (pending := self.arena.pending()).any():
            self._behind.look(pending, step, self.saver)
            return Copied(version, _NONE, sealed=False)
        else:
            distance = live.distances(self.settings.norm)
            # A spoiled copy does not count, also where its bytes happen to be right.
            changed = live.changed() | ~self.arena.intact()
            good = np.isfinite(distance)
            ids, nonfinite = np.flatnonzero(changed & good), np.flatnonzero(changed & ~good)
        self._save(live, ids, distance, version, sealed=not nonfinite.size)
        self.tracker.saved_all(but=nonfinite)
        return Copied(version, ids, sealed=not nonfinite.size, nonfinite=nonfinite)

    def _look(self, live: LiveState, step: int) -> None:
        # Not at a checkpoint that was asked for: all ranks have to look after the same iterations.
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
        self.arena.note_distances(distance)
        self.equal(ids)

    def equal(self, ids: Ids) -> None:
        """Note that live values of these partitions equal their copies in the arena."""
        self.arena.note_distances(0.0, ids)
        self.tracker.saved(ids)

    def moved(self, live: LiveState, ids: Ids) -> None:
        """Note that live values of these partitions (ascending) changed without a step: they differ from the copies."""
        self.arena.note_distances(live.distances_at(ids, self.settings.norm), ids)
        self.tracker.moved(ids)

    def spoil(self, ids: Ids) -> None:
        """Give up the copies of these partitions."""
        self.arena.spoil(ids)
        self.tracker.moved(ids)

    def copy_again(self, live: LiveState, copied: Copied, g: int) -> Copied:
        """Copy again what was copied of group `g`. What is not finite by now has no good copy of this step."""
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

    def extras(self, settled: Extras, caveats: Iterable[Caveat]) -> Extras:
        """Return `settled`, the extras of the adapter and the loop, with what this engine knows of the run."""
        norm = self.settings.norm
        notes = Notes(
            points=self.motion.history.to_array(),
            norm=norm if isinstance(norm, str) else "a function",
            caveats=tuple(caveats),
            fits=None if self.trend is None else self.trend.fits.to_array(),
        )
        return replace(settled, policy=self.policy_memory, notes=notes)

    def hand_over(self, copied: Copied, extras: Extras, whole: str = "") -> None:
        """Queue what was copied, sealed if it has the name `whole`. Returns at once: the queue is in the arena."""
        self.arena.name_whole(whole or self.arena.whole)  # before the persister looks
        number = self.queue.put(version=copied.version, ids=copied.ids, whole=whole, extras=extras.to_tree())
        self._sealing = number if whole else self._sealing
        nbytes = int(self.layout.partition_bytes[copied.ids].sum())
        self.cadence.handed_over(time.monotonic(), number, nbytes)
        self.saver.notify()

    def due(self, step: int) -> bool:
        """Whether a regular checkpoint is due after `step`. To be asked once after every iteration."""
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

    def expect(self, step: int) -> None:
        """Announce the regular checkpoint of `step`, which is due, to all ranks."""
        self.cadence.agree(self.selector.interval)
        self.selector.expect(step, self.budget_now)

    def require_saving(self) -> ScarError | None:
        """Raise what made saving stop for good. Return the fault that keeps it from saving for now; None: it saves.

        Queue what could not be queued before. Raises Unavailable: it still cannot.
        """
        if (failure := self.saver.failure) is not None:
            raise failure
        trouble = self.saver.trouble
        if self._orphaned:
            self._adopt()
        return trouble

    def pin(self, device: torch.device) -> None:
        """Pin the arena for copies from `device`, if that is wanted."""
        if self.settings.pin_memory:
            self.pinning.begin(device)

    def look_ahead(self, live: LiveState) -> None:
        """Find a part of the distances for the checkpoints to come. Called in the worker thread."""
        self.tracker.look(live, 1 / self.cadence.interval)

    def learn(self, history: History, extras: Extras | None) -> None:
        """Continue with what a session had learnt of the run when it saved these extras. history: of all ranks."""
        self.motion.go_on(history)
        if self.trend is not None:
            self.trend.go_on(None if extras is None else extras.notes.fits)

    def jumped(self, live: LiveState, ids: Ids, moved: Ids) -> None:
        """Note that the live values of partitions `ids` were restored in the running process.

        moved: those of them that were extrapolated. Both ascending.
        """
        self.equal(np.setdiff1d(ids, moved, assume_unique=True))
        if moved.size:
            self.moved(live, moved)
        self.motion.forget()
        if self.trend is not None:
            self.trend.forget(ids)

    def age_after(self, step: int) -> None:
        """Give copies of after `step` the step before: the state continues from `step`, and they are not of it.

        They never pass for exact then, and what is saved next comes after them.
        """
        ahead = np.flatnonzero(step_of(self.arena.newest()) > step)
        self.arena.relabel(ahead, pack(self.arena.epoch, max(0, step - 1)))

    def is_sealed(self) -> bool:
        """Whether every copy is of the newest iteration, in the store or on its way there."""
        waiting = [handover.version for handover in self.queue.pending() if handover.sealed]
        head, copies = self.arena.head_step, step_of(self.arena.newest())
        return head in map(step_of, waiting) or bool((copies == head).all())

    def lag(self) -> int:
        """Return the iterations since the oldest copy that is not durable yet; 0 when all copies are."""
        waiting = self.arena.version[self.arena.pending()]
        return max(0, self.arena.head_step - int(step_of(waiting).min())) if waiting.size else 0

    def start_over(self) -> None:
        """Forget what the arena has: its run was superseded, or died before its first whole checkpoint.

        To be called while nothing is saved.
        """
        self.queue.clear()
        self.arena.reset()
        if self.movements is not None:
            self.movements.gap[:] = 0

    def adopt_orphans(self) -> None:
        """Queue what was copied and not handed over, after a fault or a death: nothing else would.

        Where it cannot be queued now, `require_saving` does it later.
        """
        self._orphaned = True
        try:
            self._adopt()
        except ScarError as error:
            log.error("copies in %s cannot be queued yet: %s", self.arena.folder, error)

    def _adopt(self) -> None:
        adopt_orphans(self.arena, self.queue)
        self._orphaned = False
        self.saver.notify()

    def start(self) -> None:
        """Save to the store from now on."""
        self.saver.resume()

    def stop(self) -> None:
        """Write nothing to the store until `start`; what is queued stays queued."""
        self.saver.stop()

    @contextmanager
    def nothing_saved(self) -> Iterator[None]:
        """Write nothing to the store inside."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    def drain(self) -> None:
        """Start, and wait up to `timeout` seconds until all that is queued is durable."""
        self.start()
        self.saver.drain(self.settings.timeout)

    def forget_after(self, plan: Plan) -> None:
        """Make the sealed state of `plan`, which the arena has now, the newest: here and in the store (a new epoch)."""
        self.saver.roll_back(plan.seqs)
        self.arena.mark_all_durable(plan.whole)

    def leave(self) -> None:
        """Let go at once. What waits becomes durable in the daemon, and the arena stays for the next session."""
        self.selector.close()
        self.saver.leave()
        self.pinning.end()
        self.arena.close()

    def close(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until all is durable, then let go. Return whether all is durable.

        A durable arena is removed; otherwise it stays with its queue, and the next session on this host goes on.
        """
        self.selector.close()
        self.pinning.end()
        durable = self.saver.drain(timeout)
        self.saver.close(Current.FINISH if durable else Current.INTERRUPT)
        durable = durable and not self.arena.pending().any()
        if durable:
            self.queue.clear()
            self.arena.remove()
        else:
            self.arena.close()
        return durable
