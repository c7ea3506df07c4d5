"""Keep the state from which a session has resumed, and later doubts about its exactness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scarctl.recovery.label import DOUBTFUL, NO_COMMIT, SEVERAL, encoded_copies
from scarctl.session.peers import Together
from scarctl.session.recover import Resumed, logged
from scarctl.state.caveats import Caveats
from scarctl.state.version import step_of
from scarctl.store import Store
from scarctl.util.arrays import distinct

_ENCODED = ""
"""Encoded copies are a reason of their own."""
_BEFORE = "it was not exact when it was resumed before: "


class Origin:
    """The state from which a session has resumed, and whether that was exact."""

    def __init__(self, caveats: Caveats) -> None:
        self.resumed: Resumed | None = None
        self._caveats = caveats
        self._doubted = False

    def set(self, resumed: Resumed, stored: tuple[str, ...], store: Store, together: Together) -> Resumed:
        """Note the resumed state, with the reasons why it is not exact: mixed steps, encoded copies, earlier caveats.

        resumed: `exact` says whether all is of one step. stored: the other reasons that this rank knows. Returns the
        noted state, and logs it.
        """
        encoded = 0 if resumed.report is None else resumed.report.plan.encoded
        if encoded:
            stored = (encoded_copies(encoded), *stored)
        gathered = together.gather([_mixed(resumed, encoded, several=together.several), list(stored)])
        mixed: list[str] = []
        if not resumed.exact and resumed.step:
            mixed = _worst([theirs for theirs, _ in gathered])
        why = tuple(dict.fromkeys([*mixed, *(reason for _, theirs in gathered for reason in theirs)]))
        if why:
            # If it is saved again before a step, it is the same state: then whole, but no more exact.
            text = "; ".join(why)
            self._caveats.keep("resumed", text if resumed.exact else _BEFORE + text)
        if resumed.report is not None:
            resumed = replace(resumed, report=resumed.report.labelled(resumed.exact, why))
        resumed = replace(resumed, exact=resumed.exact and not why, whole=resumed.exact, reasons=why)
        self.resumed = logged(resumed, store, loud=together.leads)
        return self.resumed

    def doubt(self, found: tuple[str, ...]) -> None:
        """Note that the loop does not continue as the earlier run would have, and log why."""
        resumed = self.resumed
        if resumed is None or not (resumed.exact or self._doubted):
            return
        self._doubted = True
        self._caveats.say(
            "not-continued",
            f"the run was not resumed exactly after step {resumed.step}: {'; '.join(found)}. "
            "Read the data from session.batches(), see docs/loops.md",
            inexact=False,  # about later states: a run that resumes from those is checked then
        )
        self.resumed = replace(resumed, exact=False, reasons=(*resumed.reasons, *found))


def _mixed(resumed: Resumed, encoded: int, *, several: bool) -> str:
    """Return why the copies and extras of this process are not those of one commit of the whole state, if they are not.

    encoded: number of encoded copies. several: other ranks train with this process.
    """
    report = resumed.report
    if report is None:
        return SEVERAL
    steps = distinct(step_of(report.plan.version)).tolist()
    if len(steps) > 1 or (several and steps not in ([], [resumed.step])):
        return SEVERAL
    if steps not in ([], [resumed.step]):
        return (
            f"all partitions are of step {steps[0]}, but step counts, random generators and other extras of step "
            f"{resumed.step}"
        )
    if report.degraded:
        return DOUBTFUL
    return _ENCODED if encoded else NO_COMMIT


def _worst(found: Sequence[str]) -> list[str]:
    """Return what to say of the results of `_mixed`, by rank."""
    if SEVERAL in found:
        return [SEVERAL]
    others = dict.fromkeys(text for text in found if text != NO_COMMIT)
    return [text for text in others or [NO_COMMIT] if text]
