"""Judge a store and its run on this host: the cost of a loss now, the problems, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.distances import with_errors
from scarctl.daemon.status import NO_HOST, RunStatus, is_unprotected, kept_copies, part_of
from scarctl.errors import ScarError, UsageError
from scarctl.ops.surveyed import ShardLine, Survey
from scarctl.recovery.forecast import rework_of
from scarctl.state.layouts import parameters_of
from scarctl.store.saved import seconds_since
from scarctl.store.verdict import Verdict
from scarctl.theory.rework import Rework
from scarctl.util.document import Document, json_of
from scarctl.util.text import counted, span

Severity: TypeAlias = Literal["losing", "at-risk", "note"]
LOSING: Final = "losing"
"""Something is not saved."""
AT_RISK: Final = "at-risk"
"""Something is not protected as requested."""
NOTE: Final = "note"
"""Worth knowing."""
_RANK: dict[Severity, int] = {NOTE: 0, AT_RISK: 1, LOSING: 2}

_RISKS = ("behind", "turn")
"""Kinds of caveats that put the store's copies at risk of getting old."""
_AGAIN = "start it again with the command that started it"
_TRAINS = (
    "process {} trains for it, and its state is in that process alone: put the store back, or have the program write "
    "its state to another place before it ends"
)
_AWAY = (
    "a run has left copies for it in this host's memory: mount it, or move it back. If the run is over, remove the "
    "folder that `scarctl daemon status --json` names"
)


@dataclass(frozen=True, slots=True)
class Finding(Document):
    """One observation about a store."""

    severity: Severity
    kind: str
    """Stable name for programs."""
    message: str
    command: str | None = None
    """The next command line, to paste; None if the message says what to do, or there is nothing to do."""


@dataclass(frozen=True, slots=True)
class Loss(Document):
    """The cost if a process, this host, or the store is lost at this moment."""

    steps: int | None
    """Iterations since the oldest copy that remains; None: no copy remains, or the age is unknown."""
    age_is_lower_bound: bool
    """Whether the run may be further than the newest known step."""
    partitions_without_copy: int
    total_partitions: int
    perturbation: float | None
    """Norm of the change after a recovery; None: unknown."""
    rework: Rework


@dataclass(frozen=True, slots=True)
class Saving(Document):
    """The progress of the daemon with one rank or member, or with a process that trains alone."""

    rank: int | None
    member: bool
    """Whether `rank` is the number of a member."""
    step: int
    """Newest step in memory."""
    lag: int
    """Iterations from the newest step in the store to `step`."""
    pending_bytes: int
    """Bytes that wait for the store."""
    bandwidth: int
    """Bytes per second while the store is written."""
    errors: int
    copies: int
    """Hosts that have a complete copy of its memory, and receive what changes."""
    copies_wanted: int
    """Hosts that are to have one."""

    @property
    def name(self) -> str:
        """Return "rank 2", "member 2" or "process"."""
        if self.rank is None:
            return "process"
        return f"{'member' if self.member else 'rank'} {self.rank}"


@dataclass(frozen=True, slots=True)
class Health:
    """A store's findings, worst first, and the cost of a loss."""

    url: str
    findings: tuple[Finding, ...]
    losses: Mapping[str, Loss] = field(default_factory=dict)
    """By what is lost: "process", "host" or "store". Empty if nothing is saved."""
    unwell: tuple[ShardLine, ...] = ()
    """Shards with partitions that were never saved, those with most of them first."""
    survey: Survey | None = field(default=None, repr=False)
    """None: the store cannot be read."""
    saving: tuple[Saving, ...] = ()
    """The progress of this host's daemon in saving to the store, by rank."""
    exit_code: int = 0
    """Exit code of the error that prevents reading the store; 0 if the store can be read."""

    @property
    def severity(self) -> Severity:
        """The worst severity of the findings."""
        return max((finding.severity for finding in self.findings), key=_RANK.__getitem__, default=NOTE)

    @property
    def well(self) -> bool:
        """Whether nothing is lost or at risk."""
        return self.severity == NOTE

    def with_finding(self, finding: Finding) -> Health:
        """Return this with one more finding, before all others."""
        return replace(self, findings=(finding, *self.findings))

    def to_json(self) -> dict[str, Any]:
        """Return the fields of a document."""
        view = self.survey
        fields: dict[str, Any] = {
            "store": self.url,
            "well": self.well,
            "findings": json_of(self.findings),
            "if_lost": json_of(self.losses),
            "shards": json_of(self.unwell),
            "saving": json_of(self.saving),
        }
        if view is not None:
            whole = view.to_json(0)
            fields |= {
                name: whole[name]
                for name in ("step", "saved_at", "saved_seconds_ago", "memory_seconds_ago", "run")
            }
        return fields


def unreadable(
    url: str, error: ScarError, *, remembered: bool = False, runs: Iterable[RunStatus] = ()
) -> Health:
    """Return the health of a store that cannot be read.

    remembered: whether memory on this host names it. runs: the daemon's report on the runs that save to this place.
    """
    command: str | None = (
        f"scarctl verify --store {shlex.quote(url)}" if error.exit_code == 13 else _doctor(url)
    )
    unknown = ("store-without-settings", "damaged-settings", "no-store", "foreign-store")
    if error.kind in unknown or isinstance(error, UsageError):
        command = None  # none can open it
    hint = error.hint
    if error.kind == "no-store":
        training = [str(run["pid"]) for run in runs if run["phase"] == "attached"]
        hint = _TRAINS.format(", ".join(training)) if training else _AWAY if remembered else hint
    reason = f"{error.message}{f' ({hint})' if hint else ''}"
    return Health(url, (Finding(LOSING, error.kind, reason, command),), exit_code=error.exit_code)


def gone(url: str, why: str, pid: int) -> Health:
    """Return the health of a store that is gone, for which a dead process has left memory on this host."""
    text = (
        f"its store is gone: {why}. If it was moved, move it back, and start the run there: it continues from what "
        f"process {pid} left in this host's memory. Otherwise that can be saved nowhere. The daemon removes it after a "
        "day"
    )
    return Health(url, (Finding(AT_RISK, "gone", text),))


def health_of(view: Survey, runs: Iterable[RunStatus], rehearsed: Verdict | None = None) -> Health:
    """Judge a store. runs: the daemon's report on the runs that save to it. rehearsed: the last rehearsal's verdict."""
    runs = tuple(runs)
    failing = any(run.get("last_error") is not None for run in runs)
    found = [*_of_damage(view), *_of_saving(view, runs), *_of_processes(view), *_of_copies(view, failing)]
    found += [
        Finding(AT_RISK if caveat.kind in _RISKS else NOTE, caveat.kind, caveat.message)
        for caveat in view.caveats
    ]
    if view.note is not None:
        found.append(Finding(AT_RISK, "incomplete", view.note, f"scarctl inspect --store {_name(view)}"))
    if rehearsed is not None:
        found.append(Finding(NOTE, "rehearsed", str(rehearsed)))
    unwell = sorted((line for line in view.shards if line.never_saved), key=lambda line: -line.never_saved)
    found.sort(key=lambda finding: -_RANK[finding.severity])
    return Health(view.url, tuple(found), _losses(view), tuple(unwell), view, _saving(runs))


def _saving(runs: Iterable[RunStatus]) -> tuple[Saving, ...]:
    opened = [run for run in runs if "head_step" in run]
    found = [
        Saving(
            run.get("rank"),
            run.get("member", False),
            run["head_step"],
            max(run["head_step"] - run["durable_step"], 0),
            run["queued_bytes"],
            run["bytes_per_second"],
            run["errors"],
            kept_copies(run),
            len(run["peers"]),
        )
        for run in opened
    ]
    return tuple(sorted(found, key=lambda one: one.rank or 0))


def _of_saving(view: Survey, runs: Iterable[RunStatus]) -> Iterable[Finding]:
    """Yield the daemon's problems by rank: failures to save, and copies on other hosts that are not kept."""
    for run in runs:
        yield from _of_links(run)
        if run.get("last_error") is None:
            continue
        who = f"{name}: " if (name := part_of(run)) else ""
        what = "saving has stopped" if run["stopped"] else "saving fails, and is retried"
        message = f"{who}{what}: {run['last_error']} ({counted(run['errors'], 'error')})"
        yield Finding(LOSING, "stopped" if run["stopped"] else "failing", message, _doctor(view.url))


def _of_links(run: RunStatus) -> Iterable[Finding]:
    """Yield the copies of a run's memory that no other host keeps up to date. A new run has nothing to send yet."""
    who = f"{name}: " if (name := part_of(run)) else ""
    for link in run.get("peers", ()) if "head_step" in run else ():
        if is_unprotected(link):
            what = "no other host keeps a copy yet" if link == NO_HOST else f"the copy on {link}"
            text = f"{who}{what}: the loss of this host may lose what is not durable"
            yield Finding(AT_RISK, "copy", text, "scarctl daemon status")


def _of_processes(view: Survey) -> Iterable[Finding]:
    """Yield findings from the arenas on this host: dead processes, and copies that wait for the store."""
    run = view.run
    if run is None:
        return
    apart = view.topology is not None and view.topology.independent
    noun = "rank" if view.topology is None else view.topology.noun
    here = [rank for rank in view.ranks if rank.alive is not None and rank.replica_of is None]
    # A member may end while the others train. A rank may not.
    dead = [rank for rank in here if rank.alive is False and not (apart and rank.rank in view.ended)]
    if not run.alive:
        what = f"process {run.pid}" if view.topology is None else f"every {noun} on this host"
        if len(view.ended) == max(1, len(here)):
            steps = {rank.head_step for rank in here} or {run.head_step}
            of = "all of their newest steps" if len(steps) > 1 else f"all of step {steps.pop()}"
            yield Finding(NOTE, "ended", f"{what} has ended; the store has {of}")
        elif run.pending_partitions:
            text = f"{what} has died; {_pending(run.pending_partitions)}: {_AGAIN}, on this host"
            yield Finding(LOSING, "died", text)
        else:
            yield Finding(AT_RISK, "died", f"{what} has died; the store has all of its copies: {_AGAIN}")
    elif dead:
        names = ", ".join(str(rank.rank) for rank in dead)
        pending = sum(rank.pending_partitions or 0 for rank in dead)
        text = f"{noun if len(dead) == 1 else f'{noun}s'} {names} of {len(view.ranks)} died"
        text += f"; {_pending(pending)}" if pending else ""
        if apart:
            text += f": start the {noun if len(dead) == 1 else f'{noun}s'} again on this host"
        else:
            text += ": the launcher starts the ranks again, otherwise start the job again on this host"
        yield Finding(LOSING, "rank-died", text, f"scarctl inspect --store {_name(view)}")
    elif run.errors and _is_left_out(view):
        text = (
            f"{counted(run.errors, 'error')} while saving; the newest checkpoint in memory is "
            f"{span(view.memory_seconds or 0.0)} old, and all since would be lost: the training's log says why"
        )
        yield Finding(LOSING, "memory-late", text)
    elif run.errors and run.pending_partitions and _is_late(view):
        text = f"{counted(run.errors, 'error')} while saving; {_pending(run.pending_partitions)}"
        yield Finding(AT_RISK, "errors", text, _doctor(view.url))


def _of_copies(view: Survey, failing: bool) -> Iterable[Finding]:
    """Yield findings about missing copies in the store. failing: whether saving more would fail, too."""
    command = None if failing else _save(view)
    if view.layout is None:
        yield Finding(AT_RISK, "empty", "nothing is saved yet", command)
        return
    never = int((view.saved_step < 0).sum())
    if never:
        yield Finding(
            AT_RISK,
            "never-saved",
            f"the store has no copy of {never} of {counted(view.layout.partitions, 'partition')}",
            command,
        )


def _of_damage(view: Survey) -> Iterable[Finding]:
    """Yield damage to the store's newest copies that is visible without reading them."""
    if not view.damage:
        return
    (file, reason), more = view.damage[0], len(view.damage) - 1
    count = 0 if view.damaged is None else int(view.damaged.sum())
    text = f"damaged: the newest copies of {counted(count, 'partition')} in the store"
    if not count:
        text = "damaged: a part of the store's log, so that the newest copies are not known"
    text += "; older intact ones are taken, if there are any"
    text += f"; {counted(more + 1, 'file')}, such as {file}: {reason}" if more else f"; {file}: {reason}"
    yield Finding(LOSING, "damaged", text, f"scarctl verify --store {_name(view)}")


def _losses(view: Survey) -> dict[str, Loss]:
    """Return the cost of losing the process, this host, and the store."""
    if view.layout is None:
        return {}
    kept, saved = view.kept_step, view.saved_step
    if view.damaged is not None:
        saved = np.where(view.damaged, -1, saved)
    alive = view.run is not None and view.run.alive
    nowhere = np.full_like(saved, -1)
    near = saved if kept is None else np.maximum(kept, saved)
    # Memory is as the live values were at its newest checkpoint.
    from_near = None if kept is None else np.where(kept >= saved, 0.0, np.nan)
    if kept is None:
        left = nowhere
    else:
        # A live process has the values, even while a resume fills its arena. A dead one's memory belongs to its store.
        has = (kept >= 0).all() or (view.topology is None and view.run is not None and view.run.head_step > 0)
        left = np.full_like(saved, np.maximum(view.head, 0)) if alive and has else nowhere
    return {
        "process": _loss(view, near, from_near, hidden=view.hidden and kept is None),
        "host": _loss(view, saved, None if kept is None else _from_store(view), hidden=view.hidden),
        "store": _loss(view, left, None),
    }


def _from_store(view: Survey) -> NDArray[np.float64]:
    """Return the distances of memory from the store's copies, encoded or not."""
    return view.distance if view.encoding_error is None else with_errors(view.distance, view.encoding_error)


def _loss(
    view: Survey, steps: NDArray[np.int64], known: NDArray[np.float64] | None, *, hidden: bool = False
) -> Loss:
    """Return the cost of continuing from copies of these steps.

    known: the distances from these copies, if known. hidden: whether damage may hide newer copies: the cost is unknown.
    """
    assert view.layout is not None
    gone = int((steps < 0).sum())
    ages = np.maximum(view.head - steps, 0)
    parameters = parameters_of(view.layout)
    distance = known if known is not None and np.isfinite(known).all() else None
    if distance is not None and ages.any() and not distance.any():
        distance = None  # it is of an earlier moment
    if gone:
        rework = Rework(None, reason=f"{counted(gone, 'partition')} without a copy")
    elif hidden:
        rework = Rework(None, reason="damage hides how far the run was")
    else:
        measured = distance[parameters] if distance is not None and view.comparable else None
        rework = rework_of(
            view.outlook,
            1.0,
            ages=ages[parameters],
            distance=measured,
            since=0 if known is None else view.since,
        )
    return Loss(
        None if gone or hidden else int(ages.max(initial=0)),
        view.age.is_lower_bound,
        gone,
        len(steps),
        float(np.sqrt(np.square(distance).sum()))
        if distance is not None and not gone and not hidden
        else None,
        rework,
    )


def worst_first(found: Iterable[Health]) -> Sequence[Health]:
    """Return the stores in the order in which they need attention."""
    return sorted(found, key=lambda one: (-_RANK[one.severity], one.url))


def _is_late(view: Survey) -> bool:
    """Return whether the store is older than it is anyway while a run trains, because memory is ahead of it."""
    seconds = seconds_since(view.age.saved_at)
    return seconds is None or seconds > 2 * view.max_lag


def _is_left_out(view: Survey) -> bool:
    """Return whether memory gets no checkpoints although its process trains. One that waits or evaluates needs none."""
    run, seconds = view.run, view.memory_seconds
    if run is None or run.memory_age is None or seconds is None:
        return False
    return seconds > 2 * view.max_lag and run.memory_age > 2 * (run.interval or 0)


def _pending(count: int) -> str:
    return f"{counted(count, 'partition')} newer in this host's memory than in the store"


def _name(view: Survey) -> str:
    return shlex.quote(view.url)


def _doctor(url: str) -> str:
    return f"scarctl doctor --store {shlex.quote(url)}"


def _save(view: Survey) -> str | None:
    alive = view.run is not None and view.run.alive
    return f"scarctl live checkpoint --full --store {_name(view)}" if alive else None
