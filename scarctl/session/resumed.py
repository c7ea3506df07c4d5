"""Define the result of a resume, and say in one line what it restored."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from scarctl.recovery.label import NO_COMMIT, OTHERS
from scarctl.recovery.report import Report
from scarctl.session.peers import Together
from scarctl.state.held import MEMORY, STORE, Held, told_places
from scarctl.state.journal import Fact
from scarctl.state.label import SEVERAL, Label, Labelled
from scarctl.store import Store
from scarctl.store.verdict import read_verdict
from scarctl.util.text import counted

log = logging.getLogger("scarctl")


@dataclass(frozen=True, slots=True, repr=False)
class Resumed(Labelled):
    """The state that `Session.resume` restored."""

    step: int = 0
    """Iterations finished: the loop continues with the next one. 0 if the store was empty."""
    label: Label = field(default_factory=partial(Label, 0, 0))
    """Whether the state is consistent or mixed, the steps of its partitions, and whether its position was declared."""
    report: Report | None = None
    """Sources of the partitions. None if the store was empty, or if the state was saved under another division. In the
    latter case all of it came from the store."""
    ranks: Mapping[str, Any] | None = None
    """With several ranks: the lost ones, and the predicted cost; see `scarctl.distributed.resume_step`."""
    saved_at: str | None = None
    """UTC time of the newest commit in the store, in ISO 8601; None if no record has it."""
    reached: int | None = None
    """The newest iteration that the earlier run is known to have finished; None if the store held no state."""
    memory: Held | None = None
    """What this host's memory had; None without any."""
    stored: Held | None = None
    """What the store had, as far as the resume has looked."""
    rehearsed: str | None = None
    """The verdict of the program's last rehearsal: see `scarctl rehearse`."""

    @property
    def new(self) -> bool:
        """The store held no state."""
        return self.reached is None

    def __str__(self) -> str:
        """Return one line: the step, its label, sources, what each place had, lost ranks, what is trained again."""
        proof = f"; {self.rehearsed}" if self.rehearsed else ""
        if self.new:
            return f"step 0: the store holds no state, a new run begins{proof}"
        line, report = f"step {self.step}, {self.label.text}", self.report
        if report is not None and report.plan.ids.size:
            tiers = (f"{counted(count, 'partition')} from {tier}" for tier, count in report.tiers.items())
            line += f"; {', '.join(tiers)}"
        reached = self.reached or 0
        if had := told_places({MEMORY: self.memory, STORE: self.stored}, reached):
            line += f"; {had}"
        if report is not None and self.ranks is not None and (lost := self.ranks["lost"]):
            from scarctl.theory.rework import Rework

            line += (
                f"; lost {len(lost)} of {self.ranks['world']} ranks ({', '.join(map(str, lost))}), whose state is of "
                f"their last checkpoints: predicted rework in iterations {Rework(**self.ranks['rework'])}; a rollback "
                f"would cost {_number(self.ranks['rollback_steps'])}"
            )
        if reached > self.step:
            again = counted(reached - self.step, "iteration")
            line += f"; {again} of {reached} {'is' if again.startswith('1 ') else 'are'} trained again"
        return f"{line}{proof}"

    def __repr__(self) -> str:
        return f"<Resumed: {self}>"


def logged(resumed: Resumed, store: Store, *, loud: bool = True) -> Resumed:
    """Log the resumed state in one line, and return it with the verdict of the last rehearsal.

    loud: at WARNING if the state is mixed.
    """
    verdict = read_verdict(store)
    resumed = replace(resumed, rehearsed=None if verdict is None else str(verdict))
    if not resumed.new:
        level = logging.WARNING if loud and not resumed.consistent else logging.INFO
        log.log(level, "resumed %s at %s", store.url, resumed)
    elif resumed.saved_at is None:
        log.info("%s holds no state: a new run begins", store.url)
    else:
        log.warning("%s holds no complete state yet: a new run begins", store.url)
    return resumed


def facts(label: Label, report: Report | None) -> dict[str, Fact]:
    """Return the facts about a recovery that the journal keeps: see `scarctl.state.journal.Journal`."""
    known = {name: value for name, value in label.to_json().items() if name != "reasons"}
    if report is None:
        return known
    rework = report.cost.rework if report.cost is not None else None
    return {
        "mode": report.mode,
        **known,
        "partitions": report.restored_partitions,
        **report.tiers,
        "perturbation": report.perturbation.value,
        **({} if rework is None else {"low": rework.low, "high": rework.high}),
    }


def labelled(resumed: Resumed, store: Store, together: Together) -> Resumed:
    """Return the resumed state with the label of all ranks' parts, and log it."""
    own = resumed.label
    parts = [
        Label(first, last, tuple(mixed), tuple(caveats))
        for first, last, mixed, caveats in together.gather(
            [own.oldest_step, own.newest_step, list(own.mixed), list(own.caveats)]
        )
    ]
    label = Label.over(parts)
    for vague in (OTHERS, NO_COMMIT):
        if others := tuple(reason for reason in label.mixed if reason != vague):
            label = replace(label, mixed=others)
    label = replace(label, declared=own.declared)
    if resumed.report is not None:
        resumed = replace(resumed, report=resumed.report.labelled(label))
    return logged(replace(resumed, label=label), store, loud=together.leads)


def label_of(step: int, report: Report, agreed: Label, *, several: bool) -> Label:
    """Return the label of this process's copies, with extras of `step`.

    agreed: the label of all ranks' parts. several: other ranks train with this process.
    """
    own = report.label
    if agreed.of_one:
        return replace(own, mixed=())
    if own.step in (None, step):
        return replace(own, mixed=own.mixed or agreed.mixed)
    apart = f"all partitions are of step {own.step}, but step counts, random generators and other extras of step {step}"
    return replace(own, mixed=(SEVERAL if several else apart, *own.mixed))


def _number(steps: int | None) -> str:
    return "an unknown number" if steps is None else str(steps)
