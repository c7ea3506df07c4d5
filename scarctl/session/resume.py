"""Resume a session where an earlier run ended, whether that run saved under the same division or another one."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np

from scarctl.checkpoint.engine import Engine
from scarctl.checkpoint.filling import Staged, may_wait
from scarctl.checkpoint.loading import NewSlots
from scarctl.session.opening import Parts
from scarctl.session.peers import Elsewhere
from scarctl.session.recover import resume_live
from scarctl.session.resumed import Resumed
from scarctl.state.common import DIFFERED, differ, reasons
from scarctl.state.extras import Extras
from scarctl.state.layout import Layout
from scarctl.state.version import step_of
from scarctl.store import Snapshot, read_snapshot
from scarctl.store.saved import last_saved
from scarctl.util.collection import without_collection

log = logging.getLogger("scarctl")


class Resumption:
    """One attempt to resume. Live values change only when every needed partition has an intact copy."""

    def __init__(self, parts: Parts) -> None:
        self._adapter = parts.adapter
        self._progress = parts.progress
        self._binding = parts.binding
        self._store = parts.opening.store
        self._opening = parts.opening
        self._together = parts.together
        self._journal = parts.journal
        self._unhooked = parts.gate.stepping

    @without_collection()
    def run(self, mode: str, snapshot: str | None) -> Resumed:
        """Resume, and return what this process knows. Raises as `Session.resume` does."""
        resumed = Resumed()
        if not self._together.moved:
            layout: Layout | None = None

            def look() -> bool:
                nonlocal layout
                layout = self._store.current_layout()
                return layout is not None

            missing = [rank for rank, there in enumerate(self._together.collect(look)) if not there]
            if missing and layout is not None:
                log.warning(
                    "%s has no commit of ranks %s, although others have saved: they died too early, or their logs "
                    "are lost. Continuing from an earlier state, if the store has one",
                    self._store.url,
                    ", ".join(map(str, missing)),
                )
            if not missing and layout is not None:
                resumed = self._in_place(layout, mode, snapshot)
                if not resumed.new:
                    return resumed
        elsewhere = self._together.elsewhere(self._store, mode, snapshot)
        return resumed if elsewhere is None else self._from(elsewhere)

    def _in_place(self, layout: Layout, mode: str, name: str | None) -> Resumed:
        """Resume from a state that was saved under the same division."""

        def look() -> tuple[Snapshot | None, str | None, set[tuple[int, int]]]:
            snapshot = None if name is None else read_snapshot(self._store, name)
            return snapshot, last_saved(self._store), self._binding.check(layout)

        snapshot, saved_at, missing = self._together.agree(look)
        remove_slots = self._adapter.create_slots(layout)
        try:
            # What a dead process has left is saved only after the step is known from which this process continues.
            engine = self._opening.open(layout, resuming=True)
            reached, memory = engine.arena.head_step, engine.copies.in_memory()
            live = self._binding.live(engine.arena)
            live.new_slots = NewSlots(live.tensors, missing)
            # Other ranks may need this one's copies. Without hooks no step waits.
            at_once = self._together.several or self._unhooked
            staged = None if at_once or not may_wait(live) else Staged(layout, live.new_slots)
            try:
                resumed, extras = resume_live(
                    engine, live, mode if snapshot is None else "rollback", self._together, snapshot, staged
                )
            finally:
                live.new_slots = None
        except BaseException:
            remove_slots()
            raise
        if extras is None:
            remove_slots()
        report = resumed.report
        newest = 0 if report is None else int(step_of(report.plan.version).max(initial=0))
        reached = max(reached, newest, resumed.step)
        stored = None if report is None else engine.copies.in_store(report.plan, saved_at)
        resumed = replace(resumed, saved_at=saved_at, memory=memory, stored=stored)
        resumed = replace(resumed, reached=None if extras is None else reached)
        return self._continue(engine, resumed, extras)

    def _from(self, elsewhere: Elsewhere) -> Resumed:
        """Resume from a state that was saved under another division."""
        remove_slots = self._adapter.create_slots(elsewhere.layout)
        try:
            engine = self._opening.open(elsewhere.layout, resuming=True)
            # Copies of an earlier failed attempt must not count as copies of this state.
            engine.start_over()
            self._together.agree(engine.filling.run)
            agreed = self._together.agree(lambda: elsewhere.fill(engine.arena))
        except BaseException:
            remove_slots()
            raise
        live = self._binding.live(engine.arena)
        live.load(np.arange(engine.layout.partitions))
        self._together.spread()
        engine.start_over()
        saved_at = last_saved(self._store)
        resumed = Resumed(agreed.step, agreed.label, None, agreed.summary, saved_at, agreed.step)
        resumed = self._continue(engine, resumed, agreed.extras)
        self._opening.begin_saving(engine)
        return resumed

    def _continue(self, engine: Engine, resumed: Resumed, extras: Extras | None) -> Resumed:
        """Restore the extras, and start the engine. Return the resumed state with what was saved with it.

        extras: None if the store holds no state.
        """
        if extras is not None:
            label = resumed.label

            def restored() -> dict[str, str]:
                # An optimizer may have other param_groups on one rank alone.
                self._adapter.restore(extras.state)
                # A state that is not whole has digests of several moments.
                return dict(extras.notes.common) if label.of_one else {}

            caveats = label.caveats
            if differ(self._together.collect(restored)):
                caveats += (DIFFERED.message,)
            caveats += reasons(extras.notes.caveats)
            label = replace(label, caveats=caveats, declared=extras.notes.declared)
            resumed = replace(resumed, label=label)
            engine.policy_memory = extras.policy
            self._journal.follow(extras.notes.events, extras.notes.samples)
        self._progress.restore(extras, resumed.step)
        self._opening.run_on(engine, resumed.step)
        return resumed
