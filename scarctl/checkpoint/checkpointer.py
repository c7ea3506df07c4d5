"""Make one checkpoint in two halves, and count the work of a session.

The first half starts the copy on a worker thread. The second half waits for it, and repeats the copy of groups that
were written meanwhile. Then it makes the copy current, with the extras.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from scarctl.checkpoint.copied import Copied
from scarctl.checkpoint.engine import Engine
from scarctl.checkpoint.live_state import LiveState
from scarctl.checkpoint.step_end import Moment
from scarctl.checkpoint.streams import Streams, Waits, ignore_captures
from scarctl.errors import Corruption
from scarctl.policy.turns import Turn
from scarctl.state.extras import Extras
from scarctl.state.identity import Lockstep
from scarctl.util.text import counted
from scarctl.util.worker import Job, Worker

log = logging.getLogger("scarctl")

_ATTEMPTS = 8
"""Attempts to copy a group while another thread keeps writing to it. After them the checkpoint is left out."""


@dataclass(slots=True)
class Stats:
    """Counts of a session's work."""

    checkpoints: int = 0
    stall_seconds: float = 0.0
    """Seconds that the training thread has spent in hooks and waiting. A wait for a GPU counts only while that GPU has
    nothing to do, and is added when the next checkpoint begins."""
    last_stall_seconds: float = 0.0
    """Seconds of these for the newest checkpoint, without waits for a GPU."""
    copy_seconds: float = 0.0
    """Processor seconds of the thread that copies."""
    interval: int = 0
    """Iterations between two checkpoints in memory, as currently chosen; 0 before the first step."""
    saved_bytes: int = 0
    """Bytes copied into the arena."""
    nonfinite_partitions: int = 0
    """Partitions whose parameters were not finite, so that their checkpoints were left out."""
    torn_copies: int = 0
    """Groups copied again because they changed while they were copied."""
    recoveries: int = 0
    """Recoveries of lost parts in the running process."""
    errors: int = 0
    last_error: str = ""
    since: float = field(default_factory=time.perf_counter)
    """Start of the session (`time.perf_counter`)."""
    _hidden: float = field(default=0.0, repr=False)
    """Seconds of the hook that runs in which it waits for a GPU."""

    @property
    def overhead(self) -> float:
        """Share of the session's time that it costs: hooks, waiting, and copying. Between 0 and 1."""
        seconds = time.perf_counter() - self.since
        lost = self.stall_seconds + self.copy_seconds
        return min(1.0, lost / seconds) if seconds > 0 else 0.0

    def waited(self, seconds: float) -> None:
        """Leave these seconds out of the hook that runs: the GPU's own measurement replaces them."""
        self._hidden += seconds

    def stalled(self, since: float, *, first: bool = False, part: bool = False) -> None:
        """Count the time since `since` (`time.perf_counter`) as training time lost.

        part: count it for the newest checkpoint, too. first: that checkpoint began at `since`.
        """
        seconds, self._hidden = time.perf_counter() - since - self._hidden, 0.0
        self.stall_seconds += seconds
        if part:
            self.last_stall_seconds = seconds + (0.0 if first else self.last_stall_seconds)


def _leave_threads(worker: Worker) -> None:
    """Have the worker's torch calls use half as many threads as this thread's calls, at least one.

    OpenMP gives every calling thread a team of its own, permanently. If all teams together exceed the machine, their
    members stop waiting actively. Each operation of forward, backward and optimizer then costs a sleep, even without a
    copy in progress.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        return

    def take_half() -> None:
        torch.get_num_threads()  # sets the default now, because the first operation would override the next line
        torch.set_num_threads(threads // 2)

    worker.submit(take_half).wait()
    # The worker's call has also changed the default of threads that are started later.
    torch.set_num_threads(threads)


@dataclass(slots=True)
class _UnderWay:
    moment: Moment
    job: Job[Copied]
    live: LiveState
    counters: list[int]
    snapshot: list[list[torch.Tensor]] | None
    writes: int
    """Counted writes to parameters, those of other ranks' rows included, when the copy began."""
    common: Callable[[], Mapping[str, str]]
    """Digests what ranks have in common."""
    torn: bool


class Checkpoints:
    """A session's checkpoints, one at a time. Use one thread at a time."""

    def __init__(
        self,
        worker: Worker,
        streams: Streams,
        stats: Stats,
        fault: Callable[[Exception], None],
        extras: Callable[[Engine, Moment], Extras],
        lockstep: Lockstep,
        *,
        validate: bool,
    ) -> None:
        """Prepare, with a worker and two callbacks.

        fault: called with every error. An exception that it raises is passed on.
        extras: returns the extras of a moment.
        """
        self._worker = worker
        self._streams = streams
        self._waits = Waits(streams)
        self._stats = stats
        self._fault = fault
        self._extras = extras
        self._lockstep = lockstep
        self._validate = validate
        self.busy = False
        """Whether `finish` has something to wait for."""
        self._under_way: _UnderWay | None = None
        self._fill: Job[None] | None = None
        self._ignores = False
        """Whether the worker may work during a capture of a CUDA graph."""
        _leave_threads(worker)

    def fill(self, engine: Engine) -> None:
        """Have the worker fill the arena after a resume: see `Filling`. `finish` waits for it."""
        self._fill, self.busy = self._worker.submit(engine.filling.run), True

    def filled(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until the arena is filled after a resume. Return whether that has ended."""
        return self._fill is None or self._fill.settle(timeout)

    @property
    def under_way(self) -> bool:
        """Whether a first half waits for its second."""
        return self._under_way is not None

    @property
    def moment(self) -> Moment | None:
        """The moment whose first half waits for its second; None without one."""
        return None if self._under_way is None else self._under_way.moment

    def begin(
        self,
        engine: Engine,
        live: LiveState,
        moment: Moment,
        turn: Turn,
        *,
        torn: bool = False,
        thorough: bool = True,
        flush: bool = False,
        here: bool = False,
    ) -> None:
        """Start the first half: copy the state of `moment`. turn: what the store gets of it.

        torn: it is given up, as an iteration is incomplete. thorough, flush: see `Engine.copy`. here: copy in this
        thread, before the call returns.
        """
        if (trouble := engine.require_saving()) is not None:
            self._fault(trouble)  # copying continues, because another process may take over these copies
        # A forward pass changes buffers (batch norm), so the copy reads the moment's private copies instead.
        buffers = {g: [moment.buffers[live.layout.groups[g].name]] for g in live.buffers}
        live = live.with_tensors(buffers) if buffers else live

        self._stats.stall_seconds += self._waits.idle()
        marks = self._streams.complete(moment.marks, live.devices)
        if marks and not self._ignores:
            self._ignores = True
            self._worker.submit(ignore_captures)
        if marks:
            engine.pin(next(iter(marks)))

        common = self._lockstep.common()

        def copy() -> Copied:
            with self._streams.alongside(marks):
                copied = engine.copy(live, moment.step, turn, thorough=thorough, flush=flush)
                copied = replace(copied, aside=not here)
                return replace(copied, common=common()) if copied.sealed else copied

        counters, writes = live.all_counters(), self._lockstep.writes()
        snapshot = [[t.clone() for t in group] for group in live.tensors] if self._validate else None
        job = Job(copy) if here else self._worker.submit(copy)
        self._under_way, self.busy = (
            _UnderWay(moment, job, live, counters, snapshot, writes, common, torn),
            True,
        )
        if here:
            job.run()

    def ready(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the copy that the second half needs. Return whether it is done."""
        job = self._fill if self._under_way is None else self._under_way.job
        return job is None or job.settle(timeout)

    def _failed(self, under_way: _UnderWay, engine: Engine, error: BaseException) -> None:
        # After Ctrl-C, or an exception of a signal handler in the main thread, the copy itself continues.
        under_way.job.settle()
        engine.pace.turns.soon()
        if not isinstance(error, Exception):
            raise error
        self._fault(error)

    def finish(self, engine: Engine, *, hook: bool) -> Copied | None:
        """Finish the current checkpoint: its second half. Return its copies; None on failure, and without a checkpoint.

        hook: whether a hook waits for it. A call of the loop's own may wait as well, which does not count as a stall.
        """
        self._end_filling(engine)
        self.busy = False
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return None
        identities = under_way.moment.identities
        uncounted: Corruption | None = None
        try:
            copied, uncounted = self._copy_again(under_way, self._wait(under_way.job, hook=hook), engine)
            copied = engine.without_lost(copied)
            if copied.sealed:
                extras = self._extras(engine, under_way.moment)
                changed = bool(copied.ids.size)
                whole = identities.of(copied.step, engine.arena.whole, changed=changed, extras=extras.digest)
                extras = replace(extras, notes=replace(extras.notes, common=copied.common or {}))
                copied = engine.complete(copied, extras, whole)
            self._count(copied, engine)
            if not copied.sealed:
                identities.failed(engine.arena.whole)
                return copied
            identities.made()
        except BaseException as error:
            identities.failed(engine.arena.whole)
            self._failed(under_way, engine, error)
            return None
        if uncounted is not None:
            self._fault(uncounted)
        return copied

    def _end_filling(self, engine: Engine) -> None:
        fill, self._fill = self._fill, None
        if fill is None:
            return
        try:
            fill.wait()
            engine.adopt()  # copies of later steps, which the store has to get as of an earlier one
        except BaseException as error:
            # After Ctrl-C the filling itself continues, and the arena may be about to be closed.
            fill.settle()
            if not isinstance(error, Exception):
                raise
            self._fault(error)

    def _wait(self, job: Job[Copied], *, hook: bool) -> Copied:
        """Wait for the copy. On a GPU that is time lost only while the GPU has nothing to do."""
        if not hook:
            return job.wait()
        started = time.perf_counter()
        self._waits.begin()
        copied = job.wait()
        if self._waits.end():
            self._stats.waited(time.perf_counter() - started)
        return copied

    def _copy_again(
        self, under_way: _UnderWay, copied: Copied, engine: Engine
    ) -> tuple[Copied, Corruption | None]:
        """Repeat the copy of groups that were written meanwhile.

        Torch counts in-place writes to a tensor (`_version`), except writes through `.data`: `validate` finds those.
        """
        live, slot, copied = under_way.live, copied.slot, engine.without_lost(copied)
        uncounted: Corruption | None = None
        if slot is None or not copied.sealed or under_way.torn:
            return replace(copied, sealed=False), None
        written = live.written(under_way.counters)
        for g in sorted(written):
            copied = self._repeat(live, copied, g, engine)
        if under_way.snapshot is not None:
            others = {g: tensors for g, tensors in enumerate(under_way.snapshot) if g not in written}
            twin = live.with_tensors(others)
            torn = np.flatnonzero(twin.changed(slot))
            if torn.size and copied.sealed:
                twin.save(torn, slot, copied.version, copied.moment)
                uncounted = Corruption(
                    f"{engine.layout.name(int(torn[0]))} was written while it was copied, and torch did not "
                    "count the write",
                    hint="do not write through .data between optimizer steps; the copy was repeated",
                )
        if not slot.intact().all():
            return replace(copied, sealed=False), uncounted
        if written or under_way.writes != self._lockstep.writes():
            copied = replace(copied, common=under_way.common())
        return copied, uncounted

    def _repeat(self, live: LiveState, copied: Copied, g: int, engine: Engine) -> Copied:
        """Copy group `g` again until no other thread writes to it during the copy. Called in the training thread."""
        self._stats.torn_copies += 1
        for _ in range(_ATTEMPTS):
            before = live.counters(g)
            copied = engine.copy_again(live, copied, g)
            if live.counters(g) == before or not copied.sealed:
                return copied
        return replace(copied, sealed=False)

    def _count(self, copied: Copied, engine: Engine) -> None:
        stats = self._stats
        stats.copy_seconds += copied.seconds if copied.aside else 0.0
        if copied.sealed:
            stats.checkpoints += 1
            stats.saved_bytes += int(engine.layout.partition_bytes[copied.ids].sum())
        if copied.nonfinite.size:
            if not stats.nonfinite_partitions:
                log.warning(
                    "step %d: %s not finite (first: %s): memory and the store keep the state before, until all values "
                    "are finite again",
                    copied.step,
                    counted(copied.nonfinite.size, "partition"),
                    engine.layout.name(int(copied.nonfinite[0])),
                )
            stats.nonfinite_partitions += int(copied.nonfinite.size)
