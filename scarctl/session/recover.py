"""Recover inside a training process: from store to arena, verified, then from arena to live tensors.

The slot of the arena that is not current is the staging area. Live values change only when every needed partition has
an intact copy in memory.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from scarctl.adapter import Adapter, derive
from scarctl.arena.distances import from_memory
from scarctl.arena.notes import UNKNOWN
from scarctl.checkpoint.copies import Fetched, Sealed
from scarctl.checkpoint.engine import Engine
from scarctl.checkpoint.filling import Staged, age_after
from scarctl.checkpoint.live_state import LiveState
from scarctl.errors import ScarError
from scarctl.recovery.label import NO_COMMIT, OTHERS
from scarctl.recovery.plan import Perturbation, estimate
from scarctl.recovery.report import Report
from scarctl.session.forecast import mode_of_resume, shared_history, weigh_loss
from scarctl.session.peers import Found, Together
from scarctl.session.resumed import Resumed, label_of
from scarctl.state.caveats import Caveat, read_caveats
from scarctl.state.common import UNREAD, in_common, reasons
from scarctl.state.extras import Extras, Notes
from scarctl.state.version import NEVER, step_of
from scarctl.store import Snapshot
from scarctl.util.arrays import Ids, places

log = logging.getLogger("scarctl")


def resume_live(
    engine: Engine,
    live: LiveState,
    mode: str,
    together: Together,
    snapshot: Snapshot | None = None,
    staged: Staged | None = None,
) -> tuple[Resumed, Extras | None]:
    """Restore the whole state into a new process. Returns the extras too, None if the store holds no state.

    staged: where to read all copies if they are in the store, to fill the arena later; None: it is filled at once.

    Raises NoIntactCopy, Corruption, UsageError, with no live value changed.
    """
    if mode == "auto":
        mode = mode_of_resume(engine, together.agree(engine.copies.newest), together)
    if mode == "rollback":
        engine.adopt(whole=True)  # memory may have the newest state of one step
        report, sealed = _roll_back(engine, live, together, snapshot=snapshot)
        assert report.step is not None
        engine.learn(shared_history(engine, sealed, report.step, together))
        return Resumed(report.step, report.label, report), sealed
    # Saving stays stopped after a failure, because memory may be later than the step from which another attempt
    # continues.
    together.agree(engine.stop)
    resumed, extras = _resume(engine, live, together, staged)
    together.agree(engine.start)
    engine.adopt()
    return resumed, extras


def _resume(
    engine: Engine, live: LiveState, together: Together, staged: Staged | None
) -> tuple[Resumed, Extras | None]:
    found, report = together.agree(lambda: _fetch(engine, live, staged))
    agreed = together.agree_on_state(found, engine.store)
    if agreed is None:
        engine.start_over()
        return Resumed(), None
    step = agreed.step
    # Copies may be newer than the step on which ranks agree. Random generators, schedules and the data position are of
    # that step, so the run continues there.
    age_after(engine.arena, step)
    engine.learn(shared_history(engine, agreed.extras, step, together))
    assert report is not None, "every state that was found has a report"
    plan = report.plan
    if staged is not None and staged.complete:
        live.load(plan.ids, staged.tensors)
        engine.filling.later(plan, staged.source(live), step)
    else:
        together.agree(lambda: live.load(plan.ids))
    if together.brought:
        report = report.from_peer()
    together.spread()
    label = label_of(step, report, agreed.label, several=together.several)
    return Resumed(step, label, report, agreed.summary), agreed.extras


def _fetch(engine: Engine, live: LiveState, staged: Staged | None) -> tuple[Found | None, Report | None]:
    """Bring the newest copies of all partitions into the arena, or `staged`. Return None if a partition has no copy."""
    arena, there = engine.arena, engine.copies.newest()
    engine.copies.require_same_line()
    if there is None:
        return None, None
    state, newest = there
    owns = engine.layout.partitions > 0
    # A rank without rows has a state even before its first seal.
    if newest is None and (owns or engine.store.part is None):
        return None, None
    # Before the arena is filled up. Distances are those at the newest checkpoint in memory, and not of later steps.
    known, head = estimate(from_memory(arena.newest())).value, None
    if (arena.version >= 0).any():
        head = min(arena.head_step, int(step_of(arena.newest()).max()))
    report = engine.copies.fetch_all(state, live.new_slots, staged)
    version, whole = (NEVER, "") if newest is None else (newest.version, newest.whole)
    if owns and not (report.label.of_one and report.step == step_of(version) and report.plan.whole == whole):
        whole = ""
    survived = bool(whole) and arena.head_step == step_of(version)
    extras = None if newest is None else newest.extras
    return Found(version, extras, survived, known, owns, whole, head), report


def recover_live(
    engine: Engine,
    live: LiveState,
    adapter: Adapter,
    ids: Ids,
    mode: str,
    head_step: int,
    together: Together,
    max_rework: float | None = None,
    before: int | None = None,
) -> Report:
    """Restore partitions `ids` in a running process, and for a rollback everything, and the extras, too.

    before: the newest step of a copy that may be taken.

    The report's problems name values, on any rank, that are not finite although their copy is.

    Raises UsageError, NoIntactCopy, ScarError (kind "too-much-rework"), with no live value changed.
    """
    from scarctl.session.completing import complete, left_behind

    together.agree(engine.filling.run)
    now = together.agree(lambda: _distances(engine, live, ids))
    mode, cost = weigh_loss(engine, ids, now, head_step, together, mode, max_rework, before)
    if mode == "rollback":
        report, extras = _roll_back(engine, live, together, lost=ids.size)
        report = _labelled(report, extras.notes, together)
        engine.learn(shared_history(engine, extras, report.step or 0, together))
        together.agree(lambda: adapter.restore(extras.state))
        left = together.agree(lambda: left_behind(engine, live, adapter, ids, extras.state))
        return _checked(replace(report, cost=cost), left, together)
    with _known_to_differ(engine, ids):
        report, spare = together.agree(lambda: _fetch_lost(engine, live, ids, now, head_step, before))
        report = _labelled(report, _saved_with(engine, report), together)
    together.agree(lambda: _load(engine, live, report.plan.ids, spare))
    engine.jumped()
    left = together.agree(lambda: complete(engine, live, adapter, ids))
    together.spread()
    derive(adapter)
    return _checked(replace(report, cost=cost), left, together)


def _checked(report: Report, left: list[str], together: Together) -> Report:
    """Return the report with the problems of all ranks."""
    everywhere = [text for theirs in together.gather(left) for text in theirs]
    return replace(report, problems=tuple(dict.fromkeys([*report.problems, *everywhere])))


def _saved_with(engine: Engine, report: Report) -> Notes | ScarError:
    """Return the notes that were saved with the state of a recovery, or why they cannot be read."""
    try:
        return engine.copies.notes_of(report.plan.whole) if report.label.of_one else Notes()
    except ScarError as error:
        return error


def _labelled(report: Report, notes: Notes | ScarError, together: Together) -> Report:
    """Return the report with the caveats that all ranks saved with its state. notes: those of this rank."""
    if isinstance(notes, ScarError):
        notes = Notes(caveats=(Caveat(UNREAD, UNKNOWN.format(notes.message)),))
    saved = together.gather([[one.to_json() for one in notes.caveats], dict(notes.common)])
    every = [Notes(caveats=read_caveats(caveats), common=common) for caveats, common in saved]
    return report.labelled(replace(report.label, caveats=tuple(dict.fromkeys(reasons(in_common(every))))))


def _distances(engine: Engine, live: LiveState, ids: Ids) -> NDArray[np.float64]:
    """Return the distances of `ids` from their copies in memory, NaN without a copy: float64 of the shape of `ids`."""
    there = engine.arena.intact()[ids]
    found = np.full(ids.size, np.nan)
    found[there] = live.distances_at(ids[there])
    return found


def _fetch_lost(
    engine: Engine,
    live: LiveState,
    ids: Ids,
    now: NDArray[np.float64],
    head_step: int,
    before: int | None,
) -> tuple[Report, Ids]:
    """Find the newest copies of `ids`, or the newest that are not later than step `before`.

    now: live distances from the copies in the current slot; updated in place for those in the other one.
    Returns the report, and the partitions whose copies are in the other slot.
    """
    known = from_memory(engine.arena.newest())[ids]
    if before is None:
        fetched = engine.copies.fetch_lost(ids, _survivors(engine, live, ids, head_step))
    else:
        fetched = engine.fetch_before(ids, before)
    report, spare = fetched.report, fetched.spare
    if report.step != head_step:
        # Extras, such as random generators and step counts, are not restored, so the whole is not a saved state.
        report = report.labelled(report.label.because(OTHERS))
    now[places(ids, spare)] = live.distances_at(spare, slot=engine.arena.spare)
    return replace(report, perturbation=_perturbation(now, estimate(known))), spare


def _load(engine: Engine, live: LiveState, ids: Ids, spare: Ids) -> None:
    """Copy partitions `ids` into the live tensors: those in `spare` from the slot that is not current."""
    live.load(np.setdiff1d(ids, spare, assume_unique=True))
    live.load(spare, slot=engine.arena.spare)
    engine.tracker.moved(ids)


def _survivors(engine: Engine, live: LiveState, ids: Ids, head_step: int) -> str:
    """Return the name of the commit of the whole state at `head_step` with all live values but `ids`; or ""."""
    arena = engine.arena
    if not arena.whole or step_of(int(arena.newest().max(initial=NEVER))) != head_step:
        return ""
    kept = np.delete(live.changed(), ids)
    return "" if kept.any() else arena.whole


def _roll_back(
    engine: Engine,
    live: LiveState,
    together: Together,
    lost: int | None = None,
    snapshot: Snapshot | None = None,
) -> tuple[Report, Extras]:
    """Roll live values and store back to the newest state that all shards sealed at one step."""
    known = from_memory(engine.arena.newest())
    # The newest sealed state may still wait for the store.
    together.agree(engine.drain)
    everything = np.arange(engine.layout.partitions)

    def fetch(until: Sealed | None) -> tuple[Fetched, Extras]:
        fetched, extras = engine.copies.fetch_sealed(lost=lost, until=until, snapshot=snapshot)
        now = live.distances()
        now[fetched.spare] = live.distances_at(fetched.spare, slot=engine.arena.spare)
        return replace(
            fetched, report=replace(fetched.report, perturbation=_perturbation(now, estimate(known)))
        ), extras

    with _known_to_differ(engine, everything), contextlib.ExitStack() as stopped:
        # All ranks see the same logs only while no rank saves.
        together.agree(lambda: stopped.enter_context(engine.nothing_saved()))
        fetched, extras = together.agree(lambda: fetch(None))
        # If a rank finds a damaged copy, all ranks take the newest state that every rank can read.
        found = together.gather(fetched.report.plan.sealed)
        while min(found) < max(found):
            until = min(found)
            fetched, extras = together.agree(partial(fetch, until))
            found = together.gather(fetched.report.plan.sealed)
        report = fetched.report
        one = len(set(together.gather(report.plan.whole))) == 1
        label = report.label if one else report.label.because(NO_COMMIT)
        report = report.labelled(replace(label, declared=extras.notes.declared))
        together.agree(lambda: engine.forget_after(fetched))
    live.load(everything)
    together.spread()
    return report, together.completed(extras)


@contextlib.contextmanager
def _known_to_differ(engine: Engine, ids: Ids) -> Iterator[None]:
    """Count live values of `ids` as moved if the block fails: the arena may have new copies of them."""
    try:
        yield
    except BaseException:
        engine.tracker.moved(ids)
        raise


def _perturbation(distance: NDArray[np.float64], otherwise: Perturbation) -> Perturbation:
    """Return the norm of these distances as a perturbation; `otherwise` if one is not finite."""
    if np.isfinite(distance).all():
        return Perturbation(float(np.linalg.norm(distance)), "measured")
    return otherwise
