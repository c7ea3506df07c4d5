"""Name the state that a session has just saved: a snapshot."""

from __future__ import annotations

from scarctl.errors import ScarError, Unavailable
from scarctl.session.peers import Together
from scarctl.store import Store, complete_sets, create_snapshot


def name_state(name: str, store: Store, together: Together, whole: str, step: int) -> None:
    """Make the state of `step` a snapshot. All ranks call it, once they have saved the state.

    whole: the name of its commit (`scarctl.state.identity`).

    Raises ScarError (kind "not-sealed"), and as `create_snapshot` does. If `came_late`, another attempt may succeed.
    """
    together.agree(lambda: _name(name, store, whole, step) if together.leads else None)


def came_late(error: Unavailable) -> bool:
    """Return whether the state was collected from the store before it got its name."""
    return error.kind == "snapshot-late"


def _name(name: str, store: Store, whole: str, step: int) -> None:
    sealed = complete_sets(store.again(), of=None if store.part is None else store.part.shard)
    made = next((one for one in sealed if (one.whole, one.step) == (whole, step)), None)
    if made is None or not whole:
        raise ScarError(
            f"the state of step {step} could not be sealed: values are not finite, or were changed meanwhile",
            kind="not-sealed",
        )
    create_snapshot(store, name, made)
