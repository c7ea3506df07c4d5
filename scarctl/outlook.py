"""How fast the run of a store converges, as far as its checkpoints tell: read from their extras, without torch.

And with that, what a recovery will cost where no session runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl.caveats import Caveat, caveats_of
from scarctl.convergence import CannotTell
from scarctl.daemon.arena import Arena
from scarctl.errors import Corruption
from scarctl.extrapolation import FIELD as EXTRAPOLATION
from scarctl.history import History
from scarctl.layout import Layout
from scarctl.prediction import Choice, Cost, Outlook, Rework, choose, grouped, rework_of_loss
from scarctl.recovery import in_memory
from scarctl.store import ShardState, Store
from scarctl.version import NEVER, step_of

FIELD = "history"
"""Of a checkpoint's extras."""


def history_of(extras: Any) -> tuple[History, str]:
    """History and norm of the session that saved these extras; no points when it has saved none."""
    found = extras.get(FIELD) if isinstance(extras, dict) else None
    if not isinstance(found, dict):
        return History(), ""
    norm = found.get("norm")
    return History.from_array(found.get("points")), norm if isinstance(norm, str) else ""


def to_extras(history: History, norm: object) -> dict[str, Any]:
    """What `history_of` reads, as one more field of extras. norm: of the session's distances."""
    return {FIELD: {"norm": norm if isinstance(norm, str) else "a function", "points": history.to_array()}}


def of_own_part(extras: Mapping[str, Any], own: Any) -> dict[str, Any]:
    """Extras of another process, with what tells of a process's own part of the state from `own`, if it is there."""
    own = own if isinstance(own, dict) else {}
    about = (FIELD, EXTRAPOLATION)
    shared = {name: value for name, value in extras.items() if name not in about}
    return shared | {name: own[name] for name in about if name in own}


def stored_outlook(
    writers: Sequence[tuple[Store, Mapping[int, ShardState]]], step: int
) -> tuple[Outlook, str, tuple[Caveat, ...]]:
    """What the newest extras say of convergence at `step`, the norm of the run's distances, and the run's caveats.

    writers: each store as its writer sees it, with the states of its shards: one, or one for each rank that has some of
    the state. What cannot be read is no error: the outlook says so.
    """
    parts, norm, caveats = [], "", dict[Caveat, None]()
    for store, states in writers:
        newest = max(
            (state for state in states.values() if state.extras is not None),
            key=lambda state: state.extras or (0, 0),
            default=None,
        )
        try:
            found = None if newest is None else store.read_extras(newest)
        except Corruption as error:
            return Outlook(step, CannotTell(f"the run's extras are damaged: {error.message}")), "", ()
        extras = None if found is None else found[1]
        history, norm = history_of(extras)
        parts.append(history.until(step))
        caveats |= dict.fromkeys(caveats_of(extras))
    return Outlook.of(step, parts), norm, tuple(caveats)


def parameters_of(layout: Any) -> NDArray[np.bool_]:
    """Which partitions are of parameters: bool of shape (layout.partitions,)."""
    kinds = np.array([group.kind == "parameter" for group in layout.groups], dtype=bool)
    found: NDArray[np.bool_] = kinds[layout.group_of(np.arange(layout.partitions))]
    return found


def rework_of(
    outlook: Outlook,
    share: float,
    *,
    ages: NDArray[np.int64],
    distance: NDArray[np.float64] | None,
    since: int = 0,
) -> Rework:
    """Predicted rework after a `share` of the parameters' partitions went back to their copies.

    ages, distance: of those partitions, of shape (partitions,); see `rework_of_loss`. distance: in the l2 norm, `since`
    iterations ago; None when it is not known.
    """
    if not ages.size:
        return Rework(0.0, 0.0, 0.0, "distances")
    norm = None
    if distance is not None and np.isfinite(distance).all():
        norm = float(np.linalg.norm(distance))
    old, counts = grouped(ages)
    return rework_of_loss(outlook, norm, old, share, counts=counts, since=since)


@dataclass(frozen=True, slots=True)
class Loss:
    """What is lost of what one writer has saved: all of a store, or a rank's part."""

    store: Store
    states: Mapping[int, ShardState]
    layout: Layout
    ids: NDArray[np.int64]
    arena: Arena | None
    """The stopped run's, for what it knows of the values that are lost."""
    from_arena: bool
    """Its copies are there to be restored from."""


def weigh(
    losses: Sequence[Loss], sealed_step: int | None, mode: str, max_rework: float | None
) -> tuple[Choice, Cost]:
    """The way back, and what it costs. sealed_step: of what a rollback goes back to; None: there is nothing.

    Raises ScarError (kind "too-much-rework").
    """
    step = max(max((state.step for state in loss.states.values()), default=0) for loss in losses)
    step = max([step, *(loss.arena.head_step for loss in losses if loss.arena is not None)])
    outlook, norm, _ = stored_outlook(
        [(loss.store, loss.states) for loss in losses if parameters_of(loss.layout).any()], step
    )
    ages, distance, whole, since = [], [], 0, 0
    for loss in losses:
        newest, known = _copies(loss)
        parameters = parameters_of(loss.layout)
        whole += int(np.count_nonzero(parameters))
        lost = loss.ids[parameters[loss.ids]]
        ages.append(np.where(newest < 0, 0, np.maximum(step - newest, 0))[lost])
        distance.append(known[lost])
        if loss.arena is not None:
            last = int(loss.arena.newest().max(initial=NEVER))
            since = max(since, step - int(step_of(last)) if last >= 0 else 0)
    old = np.concatenate(ages)
    rework = rework_of(
        outlook,
        old.size / max(1, whole),
        ages=old,
        distance=np.concatenate(distance) if norm == "l2" else None,
        since=since,
    )
    back = None if sealed_step is None else max(0, step - sealed_step)
    choice = choose(mode, rework, back, max_rework)
    return choice, choice.cost(rework, back)


def _copies(loss: Loss) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Step of the copy that every partition would come back from, and how far that is from what was live (NaN)."""
    count = loss.layout.partitions
    newest = np.full(count, NEVER, dtype=np.int64)
    for state in loss.states.values():
        newest[state.ids] = step_of(state.version)
    distance = np.full(count, np.nan)
    if loss.arena is not None:
        if loss.from_arena:
            newest = np.maximum(newest, step_of(in_memory(loss.arena)))
        same = newest == step_of(loss.arena.newest())
        distance[same] = loss.arena.distance[same]
    return newest, distance
