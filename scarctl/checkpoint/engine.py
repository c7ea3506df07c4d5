"""Save one session's state, once its layout is known.

A checkpoint has two halves. `copy` runs on the worker thread, during the next forward and backward: distances,
selection, live rows into the arena. `hand_over` runs right before the next optimizer step and only writes a small
file. The persister saves it in the background.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
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
from scarctl.checkpoint.encoded import EncodedCopies
from scarctl.checkpoint.filling import Filling
from scarctl.checkpoint.leaving import Leaving
from scarctl.checkpoint.live_state import LiveState
from scarctl.checkpoint.motion import Motion
from scarctl.checkpoint.pace import Pace
from scarctl.checkpoint.pinning import Pinning
from scarctl.checkpoint.protection import Protection
from scarctl.checkpoint.selector import Selector
from scarctl.checkpoint.tracker import Tracker
from scarctl.checkpoint.trend import Trend
from scarctl.config import SessionSettings
from scarctl.errors import ScarError
from scarctl.persist.persister import adopt_orphans
from scarctl.persist.saver import Saver
from scarctl.persist.thread import Current
from scarctl.policy.select import Candidates
from scarctl.recovery.plan import Plan
from scarctl.state.caveats import Caveats
from scarctl.state.extras import Extras, Notes, PolicyMemory
from scarctl.state.layout import Layout
from scarctl.state.version import ages_of, pack, step_of
from scarctl.store import Store
from scarctl.theory.history import History
from scarctl.util.arrays import Ids, distinct, union

log = logging.getLogger("scarctl")
_NONE = np.empty(0, dtype=np.int64)


class Engine:
    """The saving side of a session. It makes one checkpoint at a time. Nothing is saved before `start`."""

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
        resuming: bool = False,
    ) -> None:
        """Open or create the arena in `folder`, and begin a new epoch.

        selector: selects the partitions of a partial checkpoint.
        caveats: gets a caveat when the store falls behind, or bytes in memory have changed.
        resuming: saved copies fill a new arena, whose rows get no space before.

        Raises Contention, Unavailable (arena or store is full), AccessDenied, Corruption.
        """
        self.store = store
        self.layout = layout
        self.settings = settings
        self.saver = saver
        self.shard_of = store.shard_of(layout)
        self.budget = max(1, int(settings.fraction * layout.nbytes))
        self.selector, self._caveats = selector, caveats
        self.tracker = Tracker(
            layout, settings.tracker, settings.norm, store.settings.seed, budget=self.budget
        )
        self.policy_memory = PolicyMemory()
        self.motion = Motion(layout)
        self.trend = Trend(layout) if settings.extrapolate else None
        self.arena = arena_for(folder, layout, store, sparse=resuming)
        self.filling = Filling(self.arena)
        self.pinning = Pinning(self.arena.memory())
        arena = self.arena
        self.queue = HandOverQueue(arena.folder, lambda: arena.taken)
        self.copies = Copies(self.arena, self.queue, store, self.shard_of, caveats)
        self.encoded = EncodedCopies(self.arena, settings.encoding, settings.norm)
        self._protection = Protection(self.arena, self.queue)
        most = layout.nbytes if settings.policy == "full" else self.budget
        self.pace = Pace(settings, most, selector, self.arena, self.queue, caveats)
        self.cadence = self.pace.cadence
        self._orphaned = False
        """Copies could not be queued, and have to be queued later."""
        self._behind = Behind(
            self.arena,
            self.cadence,
            settings,
            len(distinct(store.log_of(layout))),
            most,
            int(self.encoded.nbytes.sum()),
            caveats,
        )
        self.movements: Movements | None = None
        try:
            if self.trend is not None:
                self.movements = self._open_movements(self.trend.groups)
            before = self.arena.version.copy()
            saver.open(self.arena)
            self.leaving = Leaving(self.arena)
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
                self.arena.remove()  # the arena is empty, and memory is short
            raise

    def copy(self, live: LiveState, step: int, extent: Extent) -> Copied:
        """Copy the state after `step`, or a part of it, into the arena. Called in the worker thread."""
        self.filling.run()
        self.tracker.allow_full_looks()
        if extent is Extent.PART:
            return self._copy_part(live, step)
        return self._seal(live, step, extent)

    def _copy_part(self, live: LiveState, step: int) -> Copied:
        """Select partitions within the budget, and copy them."""
        version = pack(self.arena.epoch, step)
        self._look(live, step)
        distance = self.tracker.distances(live, step)
        weighed = self.encoded.weigh(distance)
        pending = self.arena.pending()
        self._behind.look(pending, step, self.saver)
        self._protection.look()
        among = Candidates(
            distance_sq=weighed.distance_sq,
            nbytes=weighed.nbytes,
            staleness=ages_of(self.arena.version, step, self.arena.sealed),
            eligible=self.leaving.eligible(~self._protection.covers(pending)),
            seed=self.store.settings.seed,
            step=step,
            max_staleness=self.settings.max_staleness,
        )
        memory = self.policy_memory
        chosen = self.selector.select(
            self.settings.policy, among, self.budget_now, credit=memory.credit, cursor=memory.cursor
        )
        self.policy_memory = PolicyMemory(chosen.credit, chosen.cursor)
        # Estimated distances have not read every value of the chosen partitions.
        ids, bad = self.tracker.check(live, chosen.ids, distance)
        self._save(live, ids, distance, version)
        exact = ids if weighed.exact is None else ids[weighed.exact[ids]]
        whole = exact.size == self.layout.partitions
        changed = (weighed.distance_sq > 0) & np.isfinite(weighed.distance_sq)
        missed = not chosen.ids.size and bool(changed.any())
        return Copied(version, ids, whole, union(chosen.nonfinite, bad), exact, missed)

    @property
    def may_copy(self) -> bool:
        """Return whether a partial checkpoint may copy any partition, if it has changed."""
        try:
            return not self._protection.covers(self.arena.pending()).all()
        except ScarError:
            return True  # the checkpoint will meet the same fault, and report it

    def owes_seal(self) -> bool:
        """Return whether a regular checkpoint must save the whole state: a seal was lost before it was durable.

        True once for each lost seal, and as long as the arena lacks copies: see `Filling`.
        """
        try:
            return self._protection.owes_seal() or self.filling.lacks_copies
        except ScarError:
            return False  # the checkpoint will meet the same fault, and report it

    @property
    def budget_now(self) -> int:
        """Return the bytes that a partial checkpoint may copy, without credit."""
        return max(1, int(self.budget * self.cadence.share))

    def _seal(self, live: LiveState, step: int, extent: Extent) -> Copied:
        """Copy all partitions that differ from their last copy, so that every copy is of `step`.

        Partitions that are not finite are left out, and then the state is not sealed. The very first checkpoint copies
        everything: it is the running checkpoint's x(0) (Qiao et al., section 4.2).
        """
        version = pack(self.arena.epoch, step)
        self._look(live, step)
        first = not (self.filling.lacks_copies or (self.arena.version >= 0).any())
        if first:
            distance = np.zeros(self.layout.partitions)
            ids, nonfinite = np.arange(self.layout.partitions), _NONE
        elif extent is Extent.WHOLE_UNLESS_BEHIND and (pending := self.arena.pending()).any():
            self._behind.look(pending, step, self.saver)
            return Copied(version, _NONE, sealed=False)
        else:
            distance = live.distances(self.settings.norm)
            # A torn copy is replaced, even if its bytes happen to be right.
            changed = live.changed() | ~self.arena.intact()
            good = np.isfinite(distance)
            ids, nonfinite = np.flatnonzero(changed & good), np.flatnonzero(changed & ~good)
        self._save(live, ids, distance, version, sealed=not nonfinite.size)
        self.tracker.saved_all(but=nonfinite)
        self.filling.lacks_copies &= bool(nonfinite.size)
        ids = self.leaving.gather(ids, nonfinite, version)
        return Copied(version, ids, sealed=not nonfinite.size, nonfinite=nonfinite)

    def _look(self, live: LiveState, step: int) -> None:
        # Only at regular checkpoints, because all ranks have to sample after the same iterations.
        if step == self.pace.due_at:
            self.motion.look(live.tensors, step)
        if self.trend is not None:
            self.trend.look(live.tensors, step)

    def _save(
        self, live: LiveState, ids: Ids, distance: NDArray[np.float64], version: int, *, sealed: bool = False
    ) -> None:
        self.leaving.copying(ids, distance[ids])
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
        """Repeat the copy of group `g`. Partitions that are not finite by now have no good copy of this step."""
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
            nonfinite=union(copied.nonfinite, bad),
            exact=copied.exact,
        )

    def extras(self, settled: Extras, notes: Notes) -> Extras:
        """Return `settled`, the extras of the adapter and the loop, with these notes and this engine's measurements."""
        norm = self.settings.norm
        notes = replace(
            notes,
            points=self.motion.history.to_array(),
            norm=norm if isinstance(norm, str) else "a function",
            fits=None if self.trend is None else self.trend.fits.to_array(),
        )
        return replace(settled, policy=self.policy_memory, notes=notes)

    def hand_over(self, copied: Copied, extras: Extras, whole: str = "") -> None:
        """Queue the copies, sealed if they have the name `whole`. Returns at once: the queue is local."""
        self.arena.name_whole(whole or self.arena.whole)  # before the persister reads it
        ids, version, unsaved = copied.ids, copied.version, self.leaving.unsaved[copied.ids]
        tree = extras.to_tree()
        sizes, dropped, number = self.encoded.sizes(copied, sealed=bool(whole)), list[int](), 0
        for n, (encoding, part) in enumerate(self.encoded.parts(copied, sealed=bool(whole))):
            number = self.queue.put(
                version=version,
                ids=ids[part],
                whole=whole,
                extras=None if n else tree,
                unsaved=unsaved[part],
                encoding=encoding,
            )
            dropped += self._protection.queued(number, version, sealed=bool(whole))
        if dropped:
            self.cadence.superseded(dropped)
        nbytes = int((self.encoded.nbytes[self.arena.pending()] if dropped else sizes).sum())
        self.pace.handed_over(number, version, nbytes)
        self.saver.notify()

    def expect(self, step: int) -> None:
        """Announce the regular checkpoint of `step`, which is due, to all ranks."""
        self.cadence.agree(self.selector.interval)
        self.selector.expect(step, self.budget_now)

    def require_saving(self) -> ScarError | None:
        """Raise the error that ended saving. Return a fault that is being retried; None while saving works.

        Queues copies that could not be queued before. Raises Unavailable if that fails again.
        """
        if (failure := self.saver.failure) is not None:
            raise failure
        trouble = self.saver.trouble
        if self._orphaned:
            self._adopt()
        return trouble

    def pin(self, device: torch.device) -> None:
        """Pin the arena for copies from `device`, if the settings allow it."""
        if self.settings.pin_memory:
            self.pinning.begin(device)

    def look_ahead(self, live: LiveState) -> None:
        """Compute a part of the distances for coming checkpoints. Called in the worker thread."""
        if not self.arena.is_filling:
            self.tracker.look(live, self.pace.look())

    def learn(self, history: History, extras: Extras | None) -> None:
        """Continue with the measurements in these extras. history: the common history of all ranks."""
        self.motion.continue_from(history)
        if self.trend is not None:
            self.trend.continue_from(None if extras is None else extras.notes.fits)

    def jumped(self, live: LiveState, ids: Ids, moved: Ids) -> None:
        """Note that the live values of `ids` were restored in place. moved: extrapolated ones. Both ascending."""
        self.equal(np.setdiff1d(ids, moved, assume_unique=True))
        if moved.size:
            self.moved(live, moved)
        self.motion.forget()
        if self.trend is not None:
            self.trend.forget(ids)

    def is_sealed(self) -> bool:
        """Return whether every copy is of the newest iteration, durable or pending."""
        handovers = self.queue.pending()
        waiting = [handover.version for handover in handovers if handover.sealed]
        lossy = (self.arena.encoding_error >= 0).any() or any(one.encoding != "exact" for one in handovers)
        head, copies = self.arena.head_step, step_of(self.arena.newest())
        if head in map(step_of, waiting) or step_of(self.arena.sealed) == head:
            return True
        return not lossy and bool((copies == head).all())

    def lag(self) -> int:
        """Return the iterations since the oldest copied change that is not durable yet; 0 if all copies are."""
        return self._behind.lag(self.arena.pending(), self.arena.head_step)

    def start_over(self) -> None:
        """Discard the arena's copies: their run was superseded, or died before its first whole checkpoint.

        Call it while saving is stopped.
        """
        self.queue.clear()
        self.arena.reset()
        if self.movements is not None:
            self.movements.gap[:] = 0

    def adopt_orphans(self) -> None:
        """Queue copies that were never handed over, after a failure or the death of a process.

        If they cannot be queued now, `require_saving` does it later.
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
        """Start saving to the store."""
        self.saver.resume()

    def stop(self) -> None:
        """Write nothing to the store until `start`. Hand-overs stay in the queue."""
        self._protection.forget_seal()
        self.saver.stop()

    @contextmanager
    def nothing_saved(self) -> Iterator[None]:
        """Write nothing to the store within the block."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    def drain(self) -> None:
        """Start saving, and wait up to `timeout` seconds until all hand-overs are durable."""
        self.start()
        self.saver.drain(self.settings.timeout)

    def forget_after(self, plan: Plan) -> None:
        """Make the sealed state of `plan`, which the arena has, the newest one, also in the store (a new epoch)."""
        self.saver.roll_back(plan.seqs)
        self.arena.mark_all_durable(plan.whole)

    def leave(self) -> None:
        """Close at once. The daemon saves pending copies, and the arena stays for the next session."""
        self.selector.close()
        self.saver.leave()
        self.pinning.end()
        self.arena.close()

    def close(self, drain: Callable[[], bool]) -> bool:
        """Wait with `drain` until the store has all hand-overs, then close. Return whether all copies are durable.

        A durable arena is removed. Otherwise it stays with its queue, for the next session on this host.
        """
        self.selector.close()
        self.pinning.end()
        durable = drain()
        self.saver.close(Current.FINISH if durable else Current.INTERRUPT)
        durable = durable and not self.arena.pending().any()
        if durable:
            self.queue.clear()
            self.arena.remove()
        else:
            self.arena.close()
        return durable
