"""Save one session's state, once its layout is known.

A checkpoint brings all of memory up to one step, and now and then it is the store's turn to get something of it.
It has two halves. `copy` runs on the worker thread, during the next forward and backward: it compares, and copies what
has changed into the slot that is not current. `complete` runs right before the next optimizer step: it writes the
extras, and makes that slot current. The persister saves from there in the background.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.arena.extras import LARGE, write_extras
from scarctl.checkpoint.copied import Copied
from scarctl.checkpoint.copies import Copies, Fetched
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
from scarctl.errors import ScarError
from scarctl.persist.saver import Saver
from scarctl.persist.thread import Current
from scarctl.policy.select import Candidates
from scarctl.policy.turns import Turn
from scarctl.state.caveats import Caveats
from scarctl.state.extras import Extras, Notes, PolicyMemory
from scarctl.state.layout import Layout
from scarctl.state.version import ages_of, pack, step_of
from scarctl.store import Store
from scarctl.util.arrays import Ids, union
from scarctl.util.text import human_bytes

if TYPE_CHECKING:
    from scarctl.theory.history import History

log = logging.getLogger("scarctl")


class Engine:
    """The saving side of a session. It makes one checkpoint at a time. Nothing is saved before `start`."""

    def __init__(
        self,
        store: Store,
        layout: Layout,
        settings: SessionSettings,
        arena: Arena,
        saver: Saver,
        *,
        selector: Selector,
        caveats: Caveats,
    ) -> None:
        """Begin a new epoch, with an arena of this layout, which is closed with the engine, or if this fails.

        selector: selects the partitions of a partial checkpoint.
        caveats: gets a caveat when the store falls behind, or bytes in memory have changed.

        Raises Contention, Unavailable (the store is full), AccessDenied, Corruption.
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
        self.arena = arena
        self.filling = Filling(self.arena)
        self.pinning = Pinning(self.arena.memory())
        self.copies = Copies(self.arena, store, self.shard_of, caveats)
        self.encoded = EncodedCopies(self.arena, settings.encoding, settings.norm)
        self.arena.note_encoding(settings.encoding)
        self.pace = Pace(settings, layout.nbytes, self.budget, selector, self.arena, caveats)
        self.cadence = self.pace.cadence
        self._large = False
        """Extras are large; this was logged."""
        try:
            saver.open(self.arena)
            self.sent = Sent(self.arena, settings.norm, exact=settings.tracker == "exact")
        except BaseException:
            self.selector.close()
            self.arena.close()
            raise

    def copy(
        self, live: LiveState, step: int, turn: Turn, *, thorough: bool = True, flush: bool = False
    ) -> Copied:
        """Bring the slot that is not current up to the state after `step`. Called in the worker thread.

        It never becomes current if values are not finite that were so before, or are marked as lost: memory then keeps
        the last good state. The very first checkpoint copies everything: it is the running checkpoint's x(0) (Qiao et
        al., section 4.2).

        thorough: compare everything, also what cannot have changed unless something unusual has written to it.
        flush: end any hold; otherwise this checkpoint is left out if a saver holds the slot.
        """
        began = time.thread_time()
        with torch.no_grad():
            copied = self._copy(live, step, turn, thorough=thorough, flush=flush)
        return replace(copied, seconds=time.thread_time() - began)

    def _copy(self, live: LiveState, step: int, turn: Turn, *, thorough: bool, flush: bool) -> Copied:
        self.filling.run()
        if step == self.pace.due_at:  # all ranks sample after the same iterations
            self.motion.look(live.tensors, step)
        arena, version = self.arena, pack(self.arena.epoch, step)
        begun = arena.begin_moment(flush=flush)
        if begun is None:
            return Copied(version, turn=turn)
        slot, moment = begun
        if self.filling.lacks_copies or arena.intact().any():
            partly = self.pace.turns.small and self.settings.tracker != "exact"
            thorough = thorough or self.filling.lacks_copies
            distance, changed = self.tracker.look(live, thorough=thorough, partly=partly)
            changed |= ~arena.intact()
        else:
            distance, changed = np.zeros(self.layout.partitions), np.ones(self.layout.partitions, dtype=bool)
        bad = np.flatnonzero(changed & ~np.isfinite(distance))
        copied = Copied(version, slot, moment, np.flatnonzero(changed), nonfinite=bad, turn=turn)
        if bad.size or self.marked.mask.any():
            return copied
        # What is equal to the current slot's copy is copied from there, so that equal moments have equal bytes.
        arena.carry(np.flatnonzero((slot.moments != arena.moments) & ~changed))
        bad = live.save(copied.ids, slot, version, moment, self.tracker.unread)
        if bad.size:
            return replace(copied, nonfinite=bad)
        self.sent.moved(copied.ids, distance[copied.ids])
        arena.note_distances(self.sent.unsaved())
        self.filling.lacks_copies = False
        copied = replace(copied, sealed=True)
        if turn is not Turn.PART:
            self.selector.read_sample()
            return copied
        # What the store has in fewer bits, it lacks, even if it never changes again.
        return self._choose(copied, slot.differs(arena.saved) | (arena.encoding_error >= 0))

    def without_lost(self, copied: Copied) -> Copied:
        """Give up a copy if partitions were marked as lost since it began: their values may be wrong."""
        return replace(copied, sealed=False) if self.marked.mask.any() else copied

    def _choose(self, copied: Copied, waiting: NDArray[np.bool_]) -> Copied:
        """Choose the partitions of a turn within the budget. waiting: those that the store lacks."""
        assert copied.slot is not None
        weighed = self.encoded.weigh(self.sent.distances(copied.slot))
        among = Candidates(
            distance_sq=weighed.distance_sq,
            nbytes=weighed.nbytes,
            staleness=ages_of(self.sent.version, copied.step),
            eligible=waiting & (not self.pace.leaving),
            seed=self.store.settings.seed,
            step=copied.step,
            max_staleness=self.settings.max_staleness,
        )
        memory = self.policy_memory
        chosen = self.selector.select(
            self.settings.policy, among, self.pace.part_bytes, credit=memory.credit, cursor=memory.cursor
        )
        self.policy_memory = PolicyMemory(chosen.credit, chosen.cursor)
        ids = chosen.ids
        if weighed.exact is None or self.encoded.encoding == "exact":
            return replace(copied, exact=ids)
        exact = weighed.exact[ids]
        return replace(copied, exact=ids[exact], encoded=ids[~exact])

    def copy_again(self, live: LiveState, copied: Copied, g: int) -> Copied:
        """Repeat the copy of group `g`. If a partition is not finite by now, the copy is given up."""
        slot = copied.slot
        assert slot is not None
        mine = np.arange(self.layout.base[g], self.layout.base[g + 1])
        now = live.changed_of(g) | ~self.arena.intact()[mine]
        others = (copied.ids < self.layout.base[g]) | (copied.ids >= self.layout.base[g + 1])
        copied = replace(copied, ids=np.sort(np.concatenate([copied.ids[others], mine[now]])))
        bad = mine[now][~np.isfinite(live.distances_at(mine[now], self.settings.norm))]
        if bad.size:
            return replace(copied, sealed=False, nonfinite=bad)
        self.arena.carry(mine[~now])
        live.save(mine[now], slot, copied.version, copied.moment)
        return copied

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

    def complete(self, copied: Copied, extras: Extras, whole: str) -> Copied:
        """Write the extras, make the copy current, and ask for what the store gets. Returns at once.

        whole: name of the state. The result is not sealed if a part was marked as lost meanwhile.
        """
        slot = copied.slot
        assert slot is not None
        nbytes = write_extras(self.arena.folder, slot.number, copied.moment, extras.to_tree())
        if nbytes > LARGE and not self._large:
            self._large = True
            log.warning(
                "step %d: extras take %s. Training waits while they are written; large tensors belong into the state",
                copied.step,
                human_bytes(nbytes),
            )
        with self.marked.none() as good:
            if not good:
                return replace(copied, sealed=False)
            self.arena.flip(slot, copied.moment, copied.version, whole)
        self.tracker.copied()  # only now: what a copy that is given up has read is compared again
        if copied.turn is not Turn.NOTHING:
            self._ask(copied)
        return copied

    def _ask(self, copied: Copied) -> None:
        arena, sizes = self.arena, self.layout.partition_bytes
        if copied.turn is Turn.WHOLE:
            ids = np.flatnonzero(arena.pending() | (arena.encoding_error >= 0))
            before = list(self.pace.turns.waiting)
            number, nbytes = arena.ask(whole=True), int(sizes[ids].sum())
        elif copied.exact.size or copied.encoded.size:
            ids, before = union(copied.exact, copied.encoded), []
            number = arena.ask(ids=copied.exact, encoded=copied.encoded)
            nbytes = int(sizes[copied.exact].sum() + self.encoded.nbytes[copied.encoded].sum())
        else:
            return
        self.pace.asked(number, nbytes, copied.step, copied.turn)
        self.pace.turns.replaced(before)  # a whole state has all that waits, and newer
        self.sent.asked(ids, copied.version if copied.turn is Turn.WHOLE else None)
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

    def fetch_before(self, ids: Ids, before: int) -> Fetched:
        """Find the newest copies of `ids` that are of step `before` or earlier: see `Copies.fetch_before`.

        What waits for the store is saved first, for up to `timeout` seconds. Raises NoIntactCopy.
        """
        from scarctl.recovery.before import in_memory_before

        if not in_memory_before(self.arena, ids, before)[0].all():
            self.drain()  # copies that wait may be the ones to take
        with self.nothing_saved():
            fetched = self.copies.fetch_before(ids, before)
        self.sent.replaced(ids)
        return fetched

    def is_sealed(self) -> bool:
        """Return whether the store has the newest iteration as a whole, or gets it: it waits."""
        arena = self.arena
        head, newest = arena.head_step, bool(arena.whole) and step_of(arena.slot.head) == arena.head_step
        return step_of(arena.sealed) == head or (newest and (arena.wants_whole or not arena.lacking()))

    def lag(self) -> int:
        """Return the iterations since the oldest checkpoint that waits for the store; 0 if none does."""
        return self.pace.lag(self.arena.head_step)

    def start_over(self) -> None:
        """Discard the arena's copies: their run was superseded, or died before its first whole checkpoint.

        Call it while saving is stopped.
        """
        self.arena.reset()
        self.sent.forget()

    def adopt(self, *, whole: bool = False) -> None:
        """Ask for what the store lacks of memory, after the death of a process.

        whole: only if the copies are of one state.
        """
        self.arena.adopt(whole=whole)
        self.pace.turns.soon()
        self.saver.notify()

    def start(self) -> None:
        """Start saving to the store."""
        self.saver.resume()

    def stop(self) -> None:
        """Write nothing to the store until `start`. Requests stay."""
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
        """Start saving, and wait up to `timeout` seconds until all requests are durable."""
        self.start()
        self.saver.drain(self.settings.timeout)

    def forget_after(self, fetched: Fetched) -> None:
        """Make a sealed state, which was fetched, the newest one, in memory and in the store (a new epoch)."""
        arena, before, seq = self.arena, self.arena.slot, fetched.report.plan.seq
        assert seq is not None, "it is the plan of a rollback"
        fetched.settle()  # first: the store's new line is noted next to what memory has then
        try:
            self.saver.roll_back(seq)
        except BaseException:
            arena.flip(before, before.moment, before.head, before.whole)
            raise
        arena.mark_all_durable()
        self.sent.forget()

    def leave(self) -> None:
        """Close at once. The daemon saves pending copies, and the arena stays for the next session."""
        self.selector.close()
        self.saver.leave()
        self.pinning.end()
        self.arena.close()

    def close(self, drain: Callable[[], bool]) -> bool:
        """Wait with `drain` until the store has all that it was asked for, then close. Return whether all is durable.

        A durable arena is removed. Otherwise it stays, for the next session on this host.
        """
        self.selector.close()
        self.pinning.end()
        durable = drain()
        self.saver.close(Current.FINISH if durable else Current.INTERRUPT)
        durable = durable and not self.arena.pending().any()
        if durable:
            self.arena.remove()
        else:
            self.arena.close()
        return durable
