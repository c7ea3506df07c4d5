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
    name: str, store: Store, together: Together, epoch: Callable[[], int], step: Callable[[], int], save: Save
) -> None:
    """Save the whole state, and keep it under `name`. epoch: that of the session now; step: of the state.

    Raises what `Session.snapshot` raises.
    """
    together.agree(lambda: check_new_snapshot(store, name))
    for last in (False, True):
        before = epoch()  # a later one when the daemon is replaced meanwhile
        together.agree(lambda: save(full=True, wait=True))
        try:
            together.agree(partial(_name, name, store, together, before, step()))
            return
        except Unavailable as error:
            if last or error.kind != "snapshot-late":
                raise


def _name(name: str, store: Store, together: Together, epoch: int, step: int) -> None:
    if not together.leads:
        return
    newest = complete_sets(store.again())[:1]
    if not newest or newest[0].epoch < epoch or newest[0].step != step:
        raise ScarError(
            f"the state of step {step} could not be sealed: it has values that are not finite",
            kind="not-sealed",
        )
    create_snapshot(store, name, newest[0])
