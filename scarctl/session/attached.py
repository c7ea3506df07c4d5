"""Keep the open sessions of this process, so that a notebook cell can attach again when it is rerun.

An interrupted cell leaves its session open, and a traceback or a variable may hold its model. The next session of the
same store replaces it.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Protocol

from scarctl.errors import Contention
from scarctl.session.ending import Ending
from scarctl.store.backends.address import Address

if TYPE_CHECKING:
    from scarctl.session.gate import Gate
    from scarctl.session.peers import Together
    from scarctl.store import Store

log = logging.getLogger("scarctl")


class Open(Protocol):
    """One session that is still open."""

    @property
    def head_step(self) -> int: ...

    store: Store
    _together: Together
    _gate: Gate
    _lasts: bool

    def _close(self, ending: Ending, *, seal: bool = True) -> None: ...


_open: dict[int, Open] = {}


def opened(session: Open) -> None:
    """Remember the session until `closed`."""
    _open[id(session)] = session


def closed(session: Open) -> None:
    """Forget the session."""
    _open.pop(id(session), None)


def take_over(store: str, member: int | None = None) -> None:
    """Close this process's open session of the store, or of this member of it, so that another one can attach.

    Raises Contention if another thread trains with it, or if a `with` statement or a framework will close it.
    """
    url = Address.parse(store).url
    for earlier in [session for session in _open.values() if _is_of(session, url, member)]:
        mine = earlier._gate.trainer == threading.get_ident()
        alive = any(thread.ident == earlier._gate.trainer for thread in threading.enumerate())
        if earlier._lasts or (alive and not mine):
            raise Contention(
                f"{url}: another session of this process ({os.getpid()}) is saving to this store",
                hint="close() it first, or leave its with statement",
            )
        log.warning(
            "closed this process's earlier session of %s, after step %d: a loop that still uses it is no longer saved",
            url,
            earlier.head_step,
        )
        # As after an exception: the newest step is flushed, without waiting for the store.
        earlier._close(Ending.FAILED)


def _is_of(session: Open, url: str, member: int | None) -> bool:
    return session.store.address.url == url and member in (None, session._together.rank)


def _after_fork() -> None:
    _open.clear()


os.register_at_fork(after_in_child=_after_fork)
