"""Save a session's whole state under a name: a snapshot."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from scarctl.errors import ScarError, Unavailable
from scarctl.session.peers import Together
from scarctl.store import Store, complete_sets, create_snapshot
from scarctl.store.snapshot import check_new_snapshot


def save_named(name: str, store: Store, together: Together, save: Callable[[], str], step: int) -> None:
    """Save the whole state of `step`, and make it a snapshot. All ranks call it.

    save: saves the state, sealed and durable, and returns the name of its commit (`scarctl.state.identity`).

    Raises UsageError for a name that exists or is not allowed, ScarError (kind "not-sealed"), the store's faults.
    """
    together.agree(lambda: check_new_snapshot(store, name))
    for again in (True, False):
        whole = together.agree(save)
        try:
            together.agree(partial(_name, name, store, whole, step) if together.leads else _nothing)
            return
        except Unavailable as error:
            if not (again and error.kind == "snapshot-late"):  # collected before it was named
                raise


def _nothing() -> None:
    """Leave naming to the rank that leads."""


def _name(name: str, store: Store, whole: str, step: int) -> None:
    sealed = complete_sets(store.again(), of=None if store.part is None else store.part.shard)
    made = next((one for one in sealed if (one.whole, one.step) == (whole, step)), None)
    if made is None or not whole:
        raise ScarError(
            f"the state of step {step} could not be sealed: values are not finite, or were changed meanwhile",
            kind="not-sealed",
        )
    create_snapshot(store, name, made)
