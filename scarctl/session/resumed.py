"""Define the result of a resume, and say in one line what it restored."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scarctl.recovery.label import DOUBTFUL, NO_COMMIT, SEVERAL, encoded_copies
from scarctl.recovery.report import Report
from scarctl.session.peers import Together
from scarctl.state.held import MEMORY, STORE, Held, told_places
from scarctl.state.journal import Fact
from scarctl.state.label import Label
from scarctl.state.version import step_of
from scarctl.store import Store
from scarctl.store.verdict import read_verdict
from scarctl.util.arrays import distinct
from scarctl.util.text import counted

log = logging.getLogger("scarctl")


@dataclass(frozen=True, slots=True, repr=False)
class Resumed:
    """The state that `Session.resume` restored."""

    step: int
    """Iterations finished: the loop continues with the next one. 0 if the store was empty."""
    consistent: bool
    """Everything that was given to `attach` is of `step`, as one commit saved it. `reasons` says why not."""
    report: Report | None
    """Sources of the partitions. None if the store was empty, or if the state was saved under another division. In the
    latter case all of it came from the store."""
    ranks: Mapping[str, Any] | None = None
    """With several ranks: the lost ones, and the predicted cost; see `scarctl.distributed.resume_step`."""
    reasons: tuple[str, ...] = ()
    """Reasons why the state is mixed, one sentence each; () if it is consistent."""
    saved_at: str | None = None
    """UTC time of the newest commit in the store, in ISO 8601; None if no record has it."""
    declared: bool = False
    """The earlier run's loop had declared the end of `step`, so that its position in the data was saved."""
    reached: int | None = None
    """The newest iteration that the earlier run is known to have finished; None if that is unknown."""
    memory: Held | None = None
    """What this host's memory had; None without any."""
    stored: Held | None = None
    """What the store had, as far as the resume has looked."""
    rehearsed: str | None = None
    """The verdict of the program's last rehearsal: see `scarctl rehearse`."""

    @property
    def label(self) -> Label:
        """The state's label."""
        steps = step_of(self.report.plan.version) if self.report is not None else np.array([self.step])
        first, last = (int(steps.min()), int(steps.max())) if steps.size else (self.step, self.step)
        return Label(self.consistent, first, last, self.declared, self.reasons)

    @property
    def new(self) -> bool:
        """The store held no state."""
        return not self.step and self.report is None

    def facts(self) -> dict[str, Fact]:
        """Return the facts that the journal keeps: see `scarctl.state.journal.Journal`."""
        return ({} if self.report is None else facts(self.report)) | self.label.to_json()

    def __str__(self) -> str:
        """Return one line: the step, its label, sources, what each place had, and what is trained again."""
        proof = f"; {self.rehearsed}" if self.rehearsed else ""
        if self.new:
            return f"step 0: the store holds no state, a new run begins{proof}"
        line, report = f"step {self.step}, {self.label}", self.report
        if report is not None and report.plan.ids.size:
            tiers = (f"{counted(count, 'partition')} from {tier}" for tier, count in report.tiers.items())
            line += f"; {', '.join(tiers)}"
        head = self.step if self.reached is None else self.reached
        if had := told_places({MEMORY: self.memory, STORE: self.stored}, head):
            line += f"; {had}"
        if self.reached is not None and self.reached > self.step:
            again = counted(self.reached - self.step, "iteration")
            line += f"; {again} of {self.reached} {'is' if again.startswith('1 ') else 'are'} trained again"
        return f"{line}{proof}"

    def __repr__(self) -> str:
        return f"<Resumed: {self}>"


def logged(resumed: Resumed, store: Store, *, loud: bool = True) -> Resumed:
    """Log the resumed state in one line, and return it with the verdict of the last rehearsal.

    loud: at WARNING if the state is mixed.
    """
    verdict = read_verdict(store)
    resumed = replace(resumed, rehearsed=None if verdict is None else str(verdict))
    if resumed.new:
        log.info("%s holds no state: a new run begins", store.url)
    else:
        level = logging.WARNING if loud and not resumed.consistent else logging.INFO
        log.log(level, "resumed %s at %s", store.url, resumed)
    return resumed


def facts(report: Report) -> dict[str, Fact]:
    """Return the facts about a recovery that the journal keeps: see `scarctl.state.journal.Journal`."""
    rework = report.cost.rework if report.cost is not None else None
    return {
        "mode": report.mode,
        "consistent": report.consistent,
        "partitions": report.restored_partitions,
        **report.tiers,
        "perturbation": report.perturbation.value,
        **({} if rework is None else {"low": rework.low, "high": rework.high}),
    }


def labelled(resumed: Resumed, stored: tuple[str, ...], store: Store, together: Together) -> Resumed:
    """Return the resumed state with the reasons of all ranks why it is mixed, and log it.

    resumed: `consistent` says whether all is of one step. stored: the other reasons that this rank knows.
    """
    encoded = 0 if resumed.report is None else resumed.report.plan.encoded
    if encoded:
        stored = (encoded_copies(encoded), *stored)
    gathered = together.gather([_mixed(resumed, encoded, several=together.several), list(stored)])
    mixed: list[str] = []
    if not resumed.consistent and resumed.step:
        mixed = _worst([theirs for theirs, _ in gathered])
    why = tuple(dict.fromkeys([*mixed, *(reason for _, theirs in gathered for reason in theirs)]))
    if resumed.report is not None:
        resumed = replace(resumed, report=resumed.report.labelled(resumed.consistent, why))
    resumed = replace(resumed, consistent=resumed.consistent and not why, reasons=why)
    return logged(resumed, store, loud=together.leads)


_ENCODED = ""
"""Encoded copies are a reason of their own."""


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
