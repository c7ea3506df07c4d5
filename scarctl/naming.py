"""Taking a snapshot of a running session: the whole state is saved, and what that gives gets a name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from scarctl.errors import ScarError, Unavailable
from scarctl.store import Store, complete_sets, create_snapshot
from scarctl.store.snapshot import check_new_snapshot
from scarctl.together import Together


class Save(Protocol):
    """Saves the state; see `Session.checkpoint`."""

    def __call__(self, *, full: bool, wait: bool) -> None: ...


def take_snapshot(
    name: str, store: Store, together: Together, saved: Callable[[], tuple[str, int]], save: Save
) -> None:
    """Save the whole state, and keep it under `name`.

    saved: the name of the whole state that was saved last (`scarctl.identity`), and its step.
    Raises what `Session.snapshot` raises.
    """
    together.agree(lambda: check_new_snapshot(store, name))
    for last in (False, True):
        together.agree(lambda: save(full=True, wait=True))
        try:
            together.agree(partial(_name, name, store, together, *saved()))
            return
        except Unavailable as error:
            if last or error.kind != "snapshot-late":
                raise


def _name(name: str, store: Store, together: Together, whole: str, step: int) -> None:
    if not together.leads:
        return
    made = next((one for one in complete_sets(store.again()) if (one.whole, one.step) == (whole, step)), None)
    if made is None or not whole:
        raise ScarError(
            f"the state of step {step} could not be sealed: values are not finite, or were changed meanwhile",
            kind="not-sealed",
        )
    create_snapshot(store, name, made)
