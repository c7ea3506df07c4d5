"""Keep the state that a session has just saved under a name."""

from __future__ import annotations

from scarctl.errors import ScarError, Unavailable
from scarctl.session.peers import Together
from scarctl.store import Store, complete_sets, create_snapshot


def name_state(name: str, store: Store, together: Together, whole: str, step: int) -> None:
    """Give the state of `step` a name. To be called by all ranks, once they have saved it.

    whole: the name of its commit (`scarctl.state.identity`). Raises ScarError (kind "not-sealed"), and what
    `create_snapshot` raises; `came_late` says whether another attempt may help.
    """
    together.agree(lambda: _name(name, store, whole, step) if together.leads else None)


def came_late(error: Unavailable) -> bool:
    """Whether the state was replaced in the store before it got its name."""
    return error.kind == "snapshot-late"


def _name(name: str, store: Store, whole: str, step: int) -> None:
    made = next((one for one in complete_sets(store.again()) if (one.whole, one.step) == (whole, step)), None)
    if made is None or not whole:
        raise ScarError(
            f"the state of step {step} could not be sealed: values are not finite, or were changed meanwhile",
            kind="not-sealed",
        )
    create_snapshot(store, name, made)
