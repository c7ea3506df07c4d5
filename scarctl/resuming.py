"""How a session begins where an earlier run has ended: with the same parts of the state, or with others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from scarctl.adapter import Adapter
from scarctl.binding import Binding
from scarctl.caveats import Caveats
from scarctl.engine import Engine
from scarctl.layout import Layout
from scarctl.restore import Resumed, check_mode, resume_live
from scarctl.store import Store, read_snapshot
from scarctl.store.saved import last_saved
from scarctl.together import Elsewhere, Together

log = logging.getLogger("scarctl")


class Open(Protocol):
    """Opens the arena and starts saving, or gives what is open."""

    def __call__(self, layout: Layout, *, stopped: bool) -> Engine: ...


class Resumption:
    """One attempt to resume. Live values change only when everything that is needed has an intact copy."""

    def __init__(
        self,
        adapter: Adapter,
        binding: Binding,
        store: Store,
        together: Together,
        open_engine: Open,
        go_on: Callable[[Engine, Resumed, Any], None],
    ) -> None:
        """go_on: called with the extras (None: there is nothing to resume from) once the state is there."""
        self._adapter = adapter
        self._binding = binding
        self._store = store
        self._together = together
        self._open = open_engine
        self._go_on = go_on

    def run(self, mode: str, snapshot: str | None) -> tuple[Resumed, bool]:
        """Resume; returns what came of it, and whether it has to be saved anew, in these parts.

        Raises what `Session.resume` raises.
        """
        check_mode(mode)
        if not self._together.moved:
            layout = self._together.agree(self._store.current_layout)
            missing = [n for n, there in enumerate(self._together.gather(layout is not None)) if not there]
            if missing and layout is not None:
                log.warning(
                    "%s has nothing of ranks %s, though others have saved: they died before they could, or their logs "
                    "are lost. Going on from a state that was saved before, if there is one",
                    self._store.url,
                    ", ".join(map(str, missing)),
                )
            if not missing and layout is not None:
                resumed = self._in_place(layout, mode, snapshot)
                if resumed.report is not None:
                    return resumed, False
        elsewhere = self._together.elsewhere(self._store, mode, snapshot)
        return (Resumed(0, True, None), False) if elsewhere is None else (self._from(elsewhere), True)

    def _in_place(self, layout: Layout, mode: str, name: str | None) -> Resumed:
        agree = self._together.agree
        snapshot = agree(lambda: None if name is None else read_snapshot(self._store, name))
        saved_at = agree(lambda: last_saved(self._store))
        agree(lambda: self._binding.check(layout))
        remove_slots = self._adapter.create_slots(layout)
        # What a dead process left becomes durable only when it is clear from which step this one goes on.
        engine = self._open(layout, stopped=True)
        live = self._binding.live(engine.arena)
        try:
            resumed, extras = resume_live(
                engine, live, mode if snapshot is None else "rollback", self._together, snapshot
            )
        except BaseException:
            remove_slots()
            raise
        if extras is None:
            remove_slots()
        resumed = replace(resumed, saved_at=saved_at)
        self._go_on(engine, resumed, extras)
        return resumed

    def _from(self, elsewhere: Elsewhere) -> Resumed:
        """Take over a state that was saved in other parts."""
        remove_slots = self._adapter.create_slots(elsewhere.layout)
        engine = self._open(elsewhere.layout, stopped=True)
        # What an attempt that came to nothing left there must not pass for a copy of what is written over it.
        engine.start_over()
        try:
            agreed = self._together.agree(lambda: elsewhere.fill(engine.arena))
        except BaseException:
            remove_slots()
            raise
        live = self._binding.live(engine.arena)
        live.load(np.arange(engine.layout.partitions))
        self._together.spread()
        engine.start_over()
        resumed = Resumed(agreed.step, agreed.exact, None, agreed.summary, saved_at=last_saved(self._store))
        self._go_on(engine, resumed, agreed.extras)
        engine.saver.resume()
        return resumed


def doubt(resumed: Resumed | None, found: tuple[str, ...], caveats: Caveats) -> Resumed | None:
    """What was resumed, after it has turned out that the loop does not continue as it would have; says so."""
    if resumed is None or not resumed.exact:
        return resumed
    caveats.say(
        "not-continued",
        f"the run was not resumed exactly after step {resumed.step}: {'; '.join(found)}. "
        "Read the data from session.batches(), see docs/loops.md",
        inexact=False,  # of later states: whether a run continues from those is looked at then
    )
    return replace(resumed, exact=False, reasons=(*resumed.reasons, *found))
