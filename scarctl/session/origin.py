"""Keep the state from which a session has resumed, and later doubts about its exactness."""

from __future__ import annotations

from dataclasses import replace

from scarctl.session.peers import Together
from scarctl.session.recover import Resumed, logged
from scarctl.state.caveats import Caveats
from scarctl.state.version import step_of
from scarctl.store import Store
from scarctl.util.text import counted

_SAVED_AGAIN = (
    "the step was saved several times, with changes between two of them, and copies of both are mixed"
)


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
            verb = "comes" if encoded == 1 else "come"
            stored = (f"{counted(encoded, 'partition')} {verb} from encoded copies", *stored)
        gathered = together.gather([_of_one_step(resumed), list(stored)])
        mixed: tuple[str, ...] = ()
        if not resumed.exact and resumed.step:
            mixed = (_SAVED_AGAIN if all(one for one, _ in gathered) else "partitions are of several steps",)
        why = tuple(dict.fromkeys([*mixed, *(reason for _, theirs in gathered for reason in theirs)]))
        if why:
            # If it is saved again before a step, it is the same state, and no more exact.
            self._caveats.keep("resumed", "; ".join(why))
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


def _of_one_step(resumed: Resumed) -> bool:
    """Return whether all copies are of the step from which the run continues."""
    report = resumed.report
    return report is not None and bool((step_of(report.plan.version) == resumed.step).all())
