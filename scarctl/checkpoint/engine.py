"""Save one session's state, once its layout is known.

A checkpoint brings all of memory up to one step, and now and then it is the store's turn to get something of it.
It has two halves. `copy` runs on the worker thread, during the next forward and backward: it compares, copies what has
changed into the arena, and sets aside the rows that the store gets. `hand_over` runs right before the next optimizer
step and only writes small files. The persister saves in the background.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.arena.kinship import arena_for
from scarctl.arena.queue import NEWEST, HandOverQueue
from scarctl.arena.staged import Staged, copy_out
from scarctl.checkpoint.copied import Copied, Part
from scarctl.checkpoint.copies import Copies
from scarctl.checkpoint.encoded import EncodedCopies
from scarctl.checkpoint.filling import Filling
from scarctl.checkpoint.live_state import LiveState
from scarctl.checkpoint.marked import Marked
from scarctl.checkpoint.motion import Motion
from scarctl.checkpoint.pace import Pace
from scarctl.checkpoint.pinning import Pinning
from scarctl.checkpoint.selector import Selector
from scarctl.checkpoint.sent import Sent
from scarctl.checkpoint.tracker import Tracker
from scarctl.config import SessionSettings
from scarctl.errors import ScarError, Unavailable
from scarctl.persist.inherited import adopt_orphans
from scarctl.persist.saver import Saver
from scarctl.persist.thread import Current
from scarctl.policy.select import Candidates
from scarctl.policy.turns import Turn
from scarctl.recovery.plan import Plan
from scarctl.recovery.report import Report
from scarctl.state.caveats import Caveats
from scarctl.state.encodings import Encoding
from scarctl.state.extras import Extras, Notes, PolicyMemory
from scarctl.state.layout import Layout
from scarctl.state.version import ages_of, pack, step_of
from scarctl.store import Store
from scarctl.util.arrays import Ids, union

if TYPE_CHECKING:
    from scarctl.theory.history import History

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
        self.selector = selector
        self.tracker = Tracker(layout, settings.norm, store.settings.seed)
        self.policy_memory = PolicyMemory()
        self.motion = Motion(layout)
        self.marked = Marked(layout)
        self.arena = arena_for(folder, layout, store, sparse=resuming)
        self.filling = Filling(self.arena)
        self.pinning = Pinning(self.arena.memory())
        arena = self.arena
        self.queue = HandOverQueue(arena.folder, lambda: arena.taken)
        self.copies = Copies(self.arena, self.queue, store, self.shard_of, caveats)
        self.encoded = EncodedCopies(self.arena, settings.encoding, settings.norm)
        self.pace = Pace(
            settings, layout.nbytes, self.budget, selector, self.arena, self.queue, saver, caveats
        )
        self.cadence = self.pace.cadence
        self._crowded = False
        """Memory had no room for rows that the store was to get; this was logged."""
        try:
            saver.open(self.arena)
            self.sent = Sent(self.arena, settings.norm, exact=settings.tracker == "exact")
        except BaseException:
            self.selector.close()
            self.arena.close()
            raise

    def copy(self, live: LiveState, step: int, turn: Turn, *, thorough: bool = True) -> Copied:
        """Bring the arena up to the state after `step`, and set aside what the store gets. Called in the worker thread.

        Partitions that are not finite, or marked as lost, are left out: their last good copies stay, and the state is
        not sealed. The very first checkpoint copies everything: it is the running checkpoint's x(0) (Qiao et al.,
        section 4.2).

        thorough: compare everything, also what cannot have changed unless something unusual has written to it.
        """
        began = time.thread_time()
        with torch.no_grad():
            copied = self._copy(live, step, turn, thorough=thorough)
        return replace(copied, seconds=time.thread_time() - began)

    def _copy(self, live: LiveState, step: int, turn: Turn, *, thorough: bool) -> Copied:
        self.filling.run()
        if step == self.pace.due_at:  # all ranks sample after the same iterations
            self.motion.look(live.tensors, step)
        arena, version = self.arena, pack(self.arena.epoch, step)
        if self.filling.lacks_copies or (arena.version >= 0).any():
            partly = self.pace.turns.small and self.settings.tracker != "exact"
            thorough = thorough or self.filling.lacks_copies
            distance, changed = self.tracker.look(live, thorough=thorough, partly=partly)
            # A torn copy is replaced, even if its bytes happen to be right.
            changed |= ~arena.intact()
        else:
            distance, changed = np.zeros(self.layout.partitions), np.ones(self.layout.partitions, dtype=bool)
        lost, good = self.marked.mask, np.isfinite(distance)
        changed &= ~lost
        ids = np.flatnonzero(changed & good)
        self.sent.moved(ids, distance[ids])
        bad = live.save(ids, version, self.tracker.unread)
        good[bad], distance[bad] = False, np.nan
        ids, nonfinite = np.flatnonzero(changed & good), np.flatnonzero(changed & ~good)
        left = union(nonfinite, np.flatnonzero(lost))
        arena.note_distances(self.sent.unsaved().astype(np.float64))
        self.tracker.copied(but=left)
        if self.pace.leaving:
            # All that the store lacks equals the live values now. As copies of one step they are saved in any order.
            # What was so before, and has not changed since, keeps the name of its state.
            waiting = arena.pending() & arena.intact() & (arena.version != version)
            waiting[left] = False
            arena.relabel(np.flatnonzero(waiting), version)
        self.filling.lacks_copies &= bool(left.size)
        copied = Copied(version, ids, sealed=not left.size, nonfinite=nonfinite, turn=turn)
        return self._set_aside(self.without_lost(copied))

    def without_lost(self, copied: Copied) -> Copied:
        """Give up the copies of partitions that were marked as lost since the copy began: their values may be wrong."""
        lost = self.marked.mask
        if not lost.any():
            return copied
        bad = copied.ids[lost[copied.ids]]
        if bad.size:
            self.spoil(bad)
            copied = self.set_aside_again(replace(copied, ids=copied.ids[~lost[copied.ids]]))
        return replace(copied, sealed=False)

    def _set_aside(self, copied: Copied) -> Copied:
        """Choose what the store gets, and copy it out of the arena, which changes before the store has taken it."""
        if copied.turn is not Turn.PART:
            self.selector.read_sample()
        if copied.turn is Turn.NOTHING:
            return copied
        # What the store has in fewer bits, it lacks, even if it never changes again.
        waiting = (self.arena.pending() | (self.arena.encoding_error >= 0)) & self.arena.intact()
        if copied.turn is Turn.WHOLE:
            parts: list[tuple[Encoding, Ids]] = [("exact", np.flatnonzero(waiting))]
        else:
            parts = self._choose(waiting, copied.step)
        made: list[Part] = []
        try:
            for encoding, ids in parts:
                made.append(Part(ids, encoding, self._rows(ids) if ids.size else None))
        except BaseException:
            replace(copied, parts=made).discard()
            raise
        return replace(copied, parts=made)

    def set_aside_again(self, copied: Copied) -> Copied:
        """Repeat `_set_aside`'s copy: the arena has changed since."""
        copied.discard()
        parts, intact = [], self.arena.intact()
        for part in copied.parts:
            ids = part.ids[intact[part.ids]]
            parts.append(Part(ids, part.encoding, self._rows(ids) if ids.size else None))
        return replace(copied, parts=parts)

    def _rows(self, ids: Ids) -> Staged | None:
        """Return the rows of these partitions, copied out; None if the arena does not change, or memory has no room."""
        if self.pace.leaving:
            return None
        try:
            return copy_out(self.arena, ids)
        except Unavailable as error:
            if not self._crowded:
                log.warning(
                    "%s. Until there is room, the store may get fewer whole states: what changes before it is read is "
                    "left to the next turn",
                    error.message,
                )
            self._crowded = True
            return None

    def _choose(self, waiting: NDArray[np.bool_], step: int) -> list[tuple[Encoding, Ids]]:
        """Choose the partitions of a turn within the budget. waiting: those that the store lacks."""
        weighed = self.encoded.weigh(self.sent.distances())
        among = Candidates(
            distance_sq=weighed.distance_sq,
            nbytes=weighed.nbytes,
            staleness=ages_of(self.sent.version, step),
            eligible=waiting & (not self.pace.leaving),
            seed=self.store.settings.seed,
            step=step,
            max_staleness=self.settings.max_staleness,
        )
        memory = self.policy_memory
        chosen = self.selector.select(
            self.settings.policy, among, self.pace.part_bytes, credit=memory.credit, cursor=memory.cursor
        )
        self.policy_memory = PolicyMemory(chosen.credit, chosen.cursor)
        ids = chosen.ids
        if weighed.exact is None or self.encoded.encoding == "exact":
            return [("exact", ids)] if ids.size else []
        exact = weighed.exact[ids]
        both: list[tuple[Encoding, Ids]] = [(self.encoded.encoding, ids[~exact]), ("exact", ids[exact])]
        return [part for part in both if part[1].size]

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
        return replace(copied, ids=copied.ids[finite], sealed=False, nonfinite=union(copied.nonfinite, bad))

    def extras(self, settled: Extras, notes: Notes) -> Extras:
        """Return `settled`, the extras of the adapter and the loop, with these notes and this engine's measurements."""
        norm = self.settings.norm
        notes = replace(
            notes,
            points=self.motion.history.to_array(),
            norm=norm if isinstance(norm, str) else "a function",
            at=time.time(),
            max_lag=self.settings.max_lag,
        )
        return replace(settled, policy=self.policy_memory, notes=notes)

    def hand_over(self, copied: Copied, extras: Extras, whole: str = "") -> None:
        """Keep the extras with the copies in memory, and queue what the store gets. Returns at once.

        whole: name of the whole state that all copies have; "" if they are of several.
        """
        tree, version = extras.to_tree(), copied.version
        self.queue.note(version=version, whole=whole, extras=tree)
        self.arena.name_whole(whole or self.arena.whole)  # before the persister reads it
        if whole:
            self.arena.note_moment(version)
        if copied.turn is not Turn.NOTHING:
            self._queue(copied, tree, whole if copied.turn is Turn.WHOLE else "")

    def _queue(self, copied: Copied, tree: Any, whole: str) -> None:
        if copied.turn is Turn.PART and not copied.parts:
            return
        before = self.queue.numbers() if copied.turn is Turn.WHOLE else []
        unsaved = self.sent.unsaved()
        parts = copied.parts or [Part(_NONE, "exact", None)]
        for n, part in enumerate(parts):
            number = self.queue.put(
                version=copied.version,
                ids=part.ids,
                whole=whole,
                extras=None if n else tree,
                unsaved=unsaved[part.ids],
                encoding=part.encoding,
                staged=part.staged,
            )
            sizes = self.layout.partition_bytes if part.encoding == "exact" else self.encoded.nbytes
            self.pace.handed_over(number, int(sizes[part.ids].sum()), copied.step, copied.turn)
            if part.staged is not None:
                self.sent.handed_over(part.ids, copied.version if whole else None)
        # A whole state has all that waits, and newer.
        for number in before:
            self.queue.remove(number)
        self.pace.turns.replaced(before)
        self.saver.notify()

    def expect(self, step: int) -> None:
        """Announce the regular checkpoint of `step`, which is due, to all ranks."""
        self.cadence.agree(self.selector.interval)
        self.selector.expect(step, self.pace.part_bytes)

    def require_saving(self) -> ScarError | None:
        """Raise the error that ended saving. Return a fault that is being retried; None while saving works."""
        if (failure := self.saver.failure) is not None:
            raise failure
        return self.saver.trouble

    def pin(self, device: torch.device) -> None:
        """Pin the arena for copies from `device`, if the settings allow it."""
        if self.settings.pin_memory:
            self.pinning.begin(device)

    def learn(self, history: History) -> None:
        """Continue with the common history of all ranks."""
        self.motion.continue_from(history)

    def jumped(self) -> None:
        """Note that live values were restored in place."""
        self.motion.forget()

    def fetch_before(self, ids: Ids, before: int) -> Report:
        """Bring the newest copies of `ids` that are of step `before` or earlier into the arena: see `Copies`.

        What waits for the store is saved first, for up to `timeout` seconds. Raises NoIntactCopy.
        """
        from scarctl.recovery.before import in_memory_before

        if not in_memory_before(self.arena, ids, before).all():
            self.drain()  # copies that wait may be the ones to take
        with self.nothing_saved():
            report, other = self.copies.fetch_before(ids, before)
            # The store's newest copies of these are of later steps, so it gets those that were restored.
            self.arena.relabel(other, pack(self.arena.epoch, self.arena.head_step))
            self.arena.note_distances(np.nan, other)
        self.sent.replaced(other)
        return report

    def is_sealed(self) -> bool:
        """Return whether the store has the newest iteration as a whole, or gets it: it waits."""
        handovers = self.queue.pending()
        waiting = [handover.version for handover in handovers if handover.sealed]
        lossy = (self.arena.encoding_error >= 0).any() or any(one.encoding != "exact" for one in handovers)
        head, copies = self.arena.head_step, step_of(self.arena.newest())
        if head in map(step_of, waiting) or step_of(self.arena.sealed) == head:
            return True
        return not (lossy or self.arena.pending().any()) and bool((copies == head).all())

    def lag(self) -> int:
        """Return the iterations since the oldest checkpoint that waits for the store; 0 if none does."""
        return self.pace.lag(self.arena.head_step)

    def start_over(self) -> None:
        """Discard the arena's copies: their run was superseded, or died before its first whole checkpoint.

        Call it while saving is stopped.
        """
        self.queue.clear()
        self.arena.reset()
        self.sent.forget()

    def adopt_orphans(self, *, whole: bool = False) -> None:
        """Queue copies in memory that the store lacks, after the death of a process. Never raises.

        whole: only if they are of one step.
        """
        try:
            adopt_orphans(self.arena, self.queue, whole=whole)
            self.pace.turns.soon()
            self.saver.notify()
        except ScarError as error:
            log.error("copies in %s cannot be queued: %s", self.arena.folder, error)

    def start(self) -> None:
        """Start saving to the store."""
        self.saver.resume()

    def stop(self) -> None:
        """Write nothing to the store until `start`. Hand-overs stay in the queue."""
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
        assert plan.seq is not None, "it is the plan of a rollback"
        self.saver.roll_back(plan.seq)
        self.arena.mark_all_durable(plan.whole)
        self.queue.remove(NEWEST)
        self.sent.forget()

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
