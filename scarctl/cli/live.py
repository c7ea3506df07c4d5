"""`scarctl checkpoint --live`: a running session is asked to save now."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl.daemon.client import ask, question
from scarctl.daemon.folder import host_folder
from scarctl.daemon.peek import peek
from scarctl.errors import Unavailable, UsageError
from scarctl.layout import Layout
from scarctl.store import Store, Topology, complete_sets, create_snapshot, newest_topology
from scarctl.version import NEVER, epoch_of, pack, step_of
from scarctl.wishes import Wish

_POLL = 0.05
_ATTEMPTS = 3
_TOGETHER = 10
"""How often several ranks are asked until all hear of it in the same step."""
_ANSWER_SECONDS = 5.0


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


@dataclass(frozen=True, slots=True)
class LiveRanks:
    """What several ranks have made durable after they were asked."""

    world: int
    ranks: dict[int, LiveCheckpoint]
    """Those that have a session on this host, by rank."""

    @property
    def step(self) -> int:
        """The oldest of their steps: they are asked at one moment, and may be a step apart."""
        return min(step_of(made.version) for made in self.ranks.values())

    @property
    def apart(self) -> bool:
        """Each of them has saved all of its state, but not of the same step."""
        steps = {step_of(made.version) for made in self.ranks.values()}
        return len(steps) > 1 and all(made.exact for made in self.ranks.values())

    @property
    def exact(self) -> bool:
        """The whole state in the store, of all ranks, is of one step."""
        whole = len(self.ranks) == self.world and all(made.exact for made in self.ranks.values())
        return whole and not self.apart

    def to_json(self) -> dict[str, Any]:
        """The same fields as for one process, over all ranks, and each of them."""
        lines = {rank: made.to_json() for rank, made in self.ranks.items()}
        names = ("total_partitions", "saved_partitions", "total_bytes", "saved_bytes")
        return {
            "step": self.step,
            **{name: sum(line[name] for line in lines.values()) for name in names},
            "durable": True,
            "exact": self.exact,
            "pid": next(iter(self.ranks.values())).pid,
            "world": self.world,
            "ranks": [{"rank": rank, **line} for rank, line in lines.items()],
        }


def checkpoint_live(
    store: Store, *, full: bool, wait: float, arena_dir: str | None, every: bool = False
) -> LiveCheckpoint | LiveRanks:
    """Ask the session that saves to `store` on this host for a checkpoint, and wait until it is durable; where several
    ranks save to it, those that are on this host.

    full: of the whole state. Where values are not finite it cannot be: then what is returned is not exact.
    every: of all ranks, or none.

    Raises UsageError (`kind` "no-session"); Unavailable when nothing new is durable after `wait` seconds.
    """
    topology = newest_topology(store)
    deadline = time.monotonic() + wait
    if topology is None:
        asked_at = _under_way(store, arena_dir)
        pid = _ask(store, full=full, arena_dir=arena_dir)
        return _wait(store, pid, asked_at, full=full, wait=wait, deadline=deadline, arena_dir=arena_dir)
    for left in reversed(range(_TOGETHER)):
        if every:
            _require_all(store, topology, arena_dir)
        made = _ask_ranks(store, topology, full=full, wait=wait, deadline=deadline, arena_dir=arena_dir)
        # Some heard of it a step later than others: ask all again.
        if not (full and made.apart and left and time.monotonic() < deadline):
            return made
    raise AssertionError("unreachable")


def _require_all(store: Store, topology: Topology, arena_dir: str | None) -> None:
    """Raise UsageError unless all ranks have a session on this host."""
    answer = question(host_folder(arena_dir), "status", patience=_ANSWER_SECONDS) or {"runs": []}
    here = {run["id"] for run in answer["runs"] if run["phase"] == "attached"}
    missing = [
        str(rank) for rank, shard in enumerate(topology.shards) if store.of_shard(shard).run_id not in here
    ]
    if missing:
        raise UsageError(
            f"no running session of rank {', '.join(missing)} saves through this host's daemon",
            hint="let the job itself take the snapshot: session.snapshot(name)",
            kind="no-session",
        )


def _ask_ranks(
    store: Store, topology: Topology, *, full: bool, wait: float, deadline: float, arena_dir: str | None
) -> LiveRanks:
    asked: dict[int, tuple[Store, int, int]] = {}
    views = [store.of_shard(shard) for shard in topology.shards]
    before = [
        _under_way(view, arena_dir) for view in views
    ]  # all first: they are to hear of it at one moment
    for rank, (view, asked_at) in enumerate(zip(views, before, strict=True)):
        if full and asked:
            # One hears of it, and tells the others: all save after the same step.
            there = peek(arena_dir, view.run_id)
            if there is not None and there.alive:
                asked[rank] = (view, there.pid, asked_at)
            continue
        try:
            asked[rank] = (view, _ask(view, full=full, arena_dir=arena_dir), asked_at)
        except UsageError as error:
            if error.kind != "no-session" or (not asked and rank + 1 == topology.world):
                raise
    made: dict[int, LiveCheckpoint] = {}
    problem: Unavailable | None = None
    for rank, (view, pid, asked_at) in asked.items():
        try:
            made[rank] = _wait(
                view, pid, asked_at, full=full, wait=wait, deadline=deadline, arena_dir=arena_dir
            )
        except Unavailable as error:
            problem = error  # perhaps nothing of what it owns has changed
    if problem is not None and (full or not made):
        raise problem
    return LiveRanks(topology.world, made)


def _under_way(store: Store, arena_dir: str | None) -> int:
    """Version of what is under way now. The session saves after its next step: what it is asked for is newer."""
    before = peek(arena_dir, store.run_id)
    newest = int(before.version.max(initial=NEVER)) if before is not None else NEVER
    return pack(epoch_of(newest), before.head_step) if before is not None and newest >= 0 else NEVER


def _ask(store: Store, *, full: bool, arena_dir: str | None) -> int:
    """Ask a session; returns its process."""
    try:
        wish = Wish("full" if full else "partial")
        return int(ask(host_folder(arena_dir), "ask", store=store.run_id, wish=wish.to_json())["pid"])
    except Unavailable as error:
        if error.kind != "no-daemon":
            raise
        raise UsageError(
            "no running session saves to this store through this host's daemon",
            hint="a session does with daemon=True, or SCARCTL_DAEMON=1",
            kind="no-session",
        ) from None


def _wait(
    store: Store, pid: int, asked_at: int, *, full: bool, wait: float, deadline: float, arena_dir: str | None
) -> LiveCheckpoint:
    """Wait until something newer than version `asked_at` is durable."""
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


def snapshot_live(
    store: Store, name: str, *, wait: float, arena_dir: str | None
) -> LiveCheckpoint | LiveRanks:
    """Have the session seal the whole state, and make that snapshot `name`. What is returned is not exact where values
    are not finite: then there is no snapshot.

    The session may collect what it has sealed before it has its name: then it is asked again. Raises what
    `checkpoint_live` and `create_snapshot` raise.
    """
    for left in reversed(range(_ATTEMPTS)):
        made = checkpoint_live(store, full=True, wait=wait, arena_dir=arena_dir, every=True)
        try:
            if made.exact:
                _name(store, made, name)
            return made
        except Unavailable as error:
            if not left or error.kind != "snapshot-late":
                raise
    raise AssertionError("unreachable")


def _name(store: Store, made: LiveCheckpoint | LiveRanks, name: str) -> None:
    if isinstance(made, LiveRanks):
        step, epoch = made.step, max(epoch_of(one.version) for one in made.ranks.values())
    else:
        step, epoch = step_of(made.version), epoch_of(made.version)
    for sealed in complete_sets(store):
        if (sealed.epoch, sealed.step) == (epoch, step):
            create_snapshot(store, name, sealed)
            return
    raise Unavailable(
        f"the state of step {step} was collected before it became snapshot {name!r}",
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
