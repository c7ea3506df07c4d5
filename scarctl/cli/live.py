"""`scarctl checkpoint --live`: a running session is asked to save now."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl.daemon.client import ask
from scarctl.daemon.folder import host_folder
from scarctl.daemon.peek import peek
from scarctl.errors import Unavailable, UsageError
from scarctl.layout import Layout
from scarctl.store import Store, create_snapshot, sealed_sets
from scarctl.version import NEVER, epoch_of, pack, step_of

_POLL = 0.05
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class LiveCheckpoint:
    """What a running session has made durable after it was asked."""

    pid: int
    version: int
    layout: Layout
    durable: NDArray[np.int64]
    """Version that the store has of every partition."""
    exact: bool
    """The whole state in the store is of this version."""

    def to_json(self) -> dict[str, Any]:
        saved = self.durable == self.version
        return {
            "step": step_of(self.version),
            "total_partitions": self.layout.partitions,
            "saved_partitions": int(saved.sum()),
            "total_bytes": self.layout.nbytes,
            "saved_bytes": int(self.layout.partition_bytes[saved].sum()),
            "durable": True,
            "exact": self.exact,
            "pid": self.pid,
        }


def checkpoint_live(store: Store, *, full: bool, wait: float, arena_dir: str | None) -> LiveCheckpoint:
    """Ask the session that saves to `store` on this host for a checkpoint, and wait until it is durable.

    full: of the whole state. Where values are not finite it cannot be: then what is returned is not exact.

    Raises UsageError (`kind` "no-session"); Unavailable when nothing new is durable after `wait` seconds.
    """
    before = peek(arena_dir, store.run_id)
    try:
        pid = int(ask(host_folder(arena_dir), "ask", store=store.run_id, full=full)["pid"])
    except Unavailable as error:
        if error.kind != "no-daemon":
            raise
        raise UsageError(
            "no running session saves to this store through this host's daemon",
            hint="a session does with daemon=True, or SCARCTL_DAEMON=1",
            kind="no-session",
        ) from None
    # The session saves after its next step: what is of an earlier one was under way before.
    newest = int(before.version.max(initial=NEVER)) if before is not None else NEVER
    asked_at = pack(epoch_of(newest), before.head_step) if before is not None and newest >= 0 else NEVER
    deadline = time.monotonic() + wait
    while True:
        started = time.monotonic()
        found = _look(store, arena_dir, asked_at, pid)
        if found is not None and (found.exact or not full):
            return found
        now = time.monotonic()
        if now > deadline:
            break
        time.sleep(max(_POLL, now - started))  # a large arena takes longer to look at
    if found is not None:
        return found
    raise Unavailable(
        f"process {pid} was asked, but nothing newer is durable after {wait:g} s",
        hint="it saves after its next step, if something has changed; `scarctl daemon status` shows how far it is",
    )


def snapshot_live(store: Store, name: str, *, wait: float, arena_dir: str | None) -> LiveCheckpoint:
    """Have the session seal the whole state, and make that snapshot `name`. What is returned is not exact where values
    are not finite: then there is no snapshot.

    The session may collect what it has sealed before it has its name: then it is asked again. Raises what
    `checkpoint_live` and `create_snapshot` raise.
    """
    for left in reversed(range(_ATTEMPTS)):
        made = checkpoint_live(store, full=True, wait=wait, arena_dir=arena_dir)
        try:
            if made.exact:
                _name(store, made, name)
            return made
        except Unavailable as error:
            if not left or error.kind != "snapshot-late":
                raise
    raise AssertionError("unreachable")


def _name(store: Store, made: LiveCheckpoint, name: str) -> None:
    wanted = epoch_of(made.version), step_of(made.version)
    for sealed in sealed_sets(store.states(store.shards()).values()):
        if (sealed.epoch, sealed.step) == wanted:
            create_snapshot(store, name, sealed)
            return
    raise Unavailable(
        f"the state of step {wanted[1]} was collected before it became snapshot {name!r}",
        hint="ask again",
        kind="snapshot-late",
    )


def _look(store: Store, arena_dir: str | None, asked_at: int, pid: int) -> LiveCheckpoint | None:
    """The durable checkpoint that is newer than version `asked_at`, None while there is none."""
    view = peek(arena_dir, store.run_id)
    if view is None:
        return _closed(store, asked_at, pid)
    if view.sealed > asked_at:
        return LiveCheckpoint(pid, view.sealed, view.layout, view.durable, exact=True)
    newer = view.durable[view.durable > asked_at]
    if not newer.size:
        return None
    version = int(newer.min())
    waiting = (view.version != view.durable) & (view.version >= 0) & (view.version <= version)
    return None if waiting.any() else LiveCheckpoint(pid, version, view.layout, view.durable, exact=False)


def _closed(store: Store, asked_at: int, pid: int) -> LiveCheckpoint | None:
    """The same when the session has ended meanwhile: it leaves no arena when all is durable.

    Perhaps without another step: then what was the newest when it was asked is what it ended with.
    """
    layout = store.current_layout()
    if layout is None:
        return None
    durable = np.full(layout.partitions, NEVER, dtype=np.int64)
    for shard in store.shards():
        state = store.state(shard, layout)
        durable[state.ids] = state.version
    version = int(durable.max(initial=NEVER))
    if version < max(asked_at, 0):
        return None
    return LiveCheckpoint(pid, version, layout, durable, exact=bool((durable == version).all()))
