"""Mark parts of a running process's state as lost, and restore them."""

from __future__ import annotations

import logging

from scarctl.checkpoint.engine import Engine
from scarctl.config.checks import check_mode
from scarctl.errors import UsageError
from scarctl.recovery.lost import Lost
from scarctl.recovery.report import Report
from scarctl.session.opening import Parts
from scarctl.session.recover import recover_live
from scarctl.session.resumed import facts
from scarctl.session.saving import Saving
from scarctl.util.arrays import Ids

log = logging.getLogger("scarctl")


class LostParts:
    """What one session does about lost parts of its live state."""

    def __init__(self, parts: Parts, saving: Saving) -> None:
        """Use the session's parts."""
        self._adapter = parts.adapter
        self._settings = parts.settings
        self._together = parts.together
        self._progress = parts.progress
        self._binding = parts.binding
        self._opening = parts.opening
        self._journal = parts.journal
        self._saving = saving

    def mark(self, engine: Engine, lost: Lost) -> int:
        """See `Session.mark_lost`."""
        ids = self._together.own_ids(lost, engine.layout, self._opening.store)
        if ids.size:
            engine.marked.add(ids)
            log.warning(
                "step %d: %s. Until recover() memory and the store keep their last state: no checkpoint is made",
                self._progress.head_step,
                engine.marked.told,
            )
        return int(ids.size)

    def recover(
        self, engine: Engine, lost: Lost | None, mode: str, max_rework: float | None, before: int | None
    ) -> Report:
        """See `Session.recover`. Call it with the gate held, outside of a step."""
        check_mode(mode)
        self._check_before(mode, before)
        self._progress.declare()
        self._saving.finish()
        ids = self._named(engine, lost)
        live = self._together.agree(lambda: self._binding.live(engine.arena))
        head = self._progress.head_step
        report = recover_live(
            engine, live, self._adapter, ids, mode, head, self._together, max_rework, before
        )
        engine.marked.remove(report.plan.ids)
        self._saving.jumped()
        if report.mode == "rollback" and report.step is not None:
            self._progress.restore(None, report.step)
            engine.arena.reach(report.step)
        self._journal.add("recovered", self._progress.head_step, **facts(report.label, report))
        if self._settings.flush_on_signal:
            self._saving.take()
        return report

    def _check_before(self, mode: str, before: int | None) -> None:
        if before is None:
            return
        head = self._progress.head_step
        if isinstance(before, bool) or not isinstance(before, int) or before < 0:
            raise UsageError(f"before is {before!r}, not the number of a step")
        if before > head:
            raise UsageError(
                f"before={before} is in the future: {head} iterations are finished",
                hint="give the last step after which these parts were still right",
            )
        if mode != "partial":
            raise UsageError(
                f'before={before} is for mode="partial", which takes single copies, not for mode={mode!r}',
                hint="omit one of them",
            )

    def _named(self, engine: Engine, lost: Lost | None) -> Ids:
        """Return the partitions of this process to restore. Called on all ranks."""
        if lost is not None:
            return self._together.lost_ids(lost, engine.layout, self._opening.store)
        ids = engine.marked.ids
        if not any(self._together.gather(int(ids.size))):
            raise UsageError(
                "recover() without lost restores what mark_lost() has marked, and nothing is marked",
                hint="name the lost parts: numbers of shards or ranks, patterns of names, or 'all'",
            )
        return ids
