"""Ask a running session to save now, to take a snapshot, or to restore a part of its state in place."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.folder import host_folder
from scarctl.arena.notes import UNKNOWN
from scarctl.arena.view import peek
from scarctl.daemon.client import ask, ask_status
from scarctl.daemon.request import Request
from scarctl.errors import ScarError, Unavailable, UsageError, error_from
from scarctl.recovery.label import MEMBERS, NO_COMMIT, Writer, noted
from scarctl.recovery.shares import open_shares
from scarctl.state.label import PART, Label, Labelled
from scarctl.state.layout import Layout
from scarctl.state.version import NEVER, epoch_of, pack, step_of
from scarctl.store import Store, Topology, complete_sets, create_snapshot, newest_topology
from scarctl.store.snapshot import check_new_snapshot

_POLL = 0.05
_ANSWER_POLL = 0.1
_ATTEMPTS = 3
_TOGETHER = 10
"""Most attempts to have all ranks save after the same step."""
_ANSWER_SECONDS = 5.0
_PATIENCE = 10.0
"""Seconds in which the daemon has to accept a request."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A request for a checkpoint."""

    full: bool
    timeout: float
    """Seconds to wait for it."""
    deadline: float
    """The end of these seconds, by the monotonic clock."""
    arena_dir: str | None


@dataclass(frozen=True, slots=True)
class LiveCheckpoint(Labelled):
    """A durable checkpoint of a running session."""

    pid: int
    version: int
    layout: Layout
    durable: NDArray[np.int64]
    """Durable version of every partition."""
    label: Label
    """The label of the whole state in the store."""

    def to_json(self) -> dict[str, Any]:
        saved = self.durable == self.version
        return {
            "step": step_of(self.version),
            "total_partitions": self.layout.partitions,
            "saved_partitions": int(saved.sum()),
            "total_bytes": self.layout.nbytes,
            "saved_bytes": int(self.layout.partition_bytes[saved].sum()),
            "durable": True,
            **self.label.to_json(),
            "pid": self.pid,
        }


@dataclass(frozen=True, slots=True)
class LiveRanks(Labelled):
    """Durable checkpoints of several ranks."""

    world: int
    ranks: dict[int, LiveCheckpoint]
    """Checkpoints by rank or member, for those with a session on this host."""
    independent: bool
    """Whether the processes are members, which have no common step."""
    label: Label
    """The label of the whole state in the store, of all ranks."""

    @property
    def step(self) -> int:
        """The oldest of their steps. Ranks receive a request at one moment, and may be a step apart."""
        return min(step_of(made.version) for made in self.ranks.values())

    @property
    def apart(self) -> bool:
        """Whether each rank has saved its whole state, but not all of the same step."""
        return self.label.step is None and all(made.label.of_one for made in self.ranks.values())

    @property
    def complete(self) -> bool:
        """Whether every rank or member has saved its whole state."""
        return len(self.ranks) == self.world and all(made.label.of_one for made in self.ranks.values())

    def to_json(self) -> dict[str, Any]:
        """Return the fields of one process summed over all ranks, and those of each rank."""
        lines = {rank: made.to_json() for rank, made in self.ranks.items()}
        names = ("total_partitions", "saved_partitions", "total_bytes", "saved_bytes")
        return {
            "step": self.step,
            **{name: sum(line[name] for line in lines.values()) for name in names},
            "durable": True,
            **self.label.to_json(),
            "pid": next(iter(self.ranks.values())).pid,
            "world": self.world,
            "members": self.independent,
            "complete": self.complete,
            "ranks": [{"rank": rank, **line} for rank, line in lines.items()],
        }


def checkpoint_live(
    store: Store, *, full: bool, timeout: float, arena_dir: str | None, every: bool = False
) -> LiveCheckpoint | LiveRanks:
    """Request a checkpoint from the session that saves to `store` on this host, and wait until it is durable.

    If several ranks or members save to the store, those on this host get the request.

    full: save the whole state. If values are not finite, the result is not whole.
    every: raise unless all ranks have a session on this host.

    Raises UsageError (`kind` "no-session"), and Unavailable if no new checkpoint is durable after `timeout` seconds.
    """
    topology = newest_topology(store)
    request = _Request(full, timeout, time.monotonic() + timeout, arena_dir)
    if topology is None:
        asked_at = _under_way(store, arena_dir)
        found = _wait(store, _ask(store, request), asked_at, request)
        return replace(found, label=_noted(found.label, store, [(store, found)]))
    if every and topology.independent:
        raise UsageError(
            f"{store.url}: members have no common step, so that no snapshot can cover all of them",
            hint="take a snapshot in one member: session.snapshot(name)",
            kind="members-apart",
        )
    for left in reversed(range(_TOGETHER)):
        if every:
            _require_all(store, topology, arena_dir)
        made = _ask_ranks(store, topology, request)
        # Some ranks got the request a step later than others, so it is repeated for all.
        again = full and made.apart and not topology.independent
        if not (again and left and time.monotonic() < request.deadline):
            return made
    raise AssertionError("unreachable")


def _require_all(store: Store, topology: Topology, arena_dir: str | None) -> None:
    """Raise UsageError unless all ranks have a session on this host."""
    answer = ask_status(host_folder(arena_dir), patience=_ANSWER_SECONDS)
    here = {run["id"] for run in (answer["runs"] if answer else []) if run["phase"] == "attached"}
    missing = [
        str(rank) for rank, shard in enumerate(topology.shards) if store.of_shard(shard).run_id not in here
    ]
    if missing:
        raise UsageError(
            f"no running session of rank {', '.join(missing)} saves through this host's daemon",
            hint="take the snapshot in the job: session.snapshot(name)",
            kind="no-session",
        )


def _ask_ranks(store: Store, topology: Topology, request: _Request) -> LiveRanks:
    asked: dict[int, tuple[Store, int, int]] = {}
    views = [store.of_shard(shard) for shard in topology.shards]
    # Read for all ranks first, because all have to get the request at one moment.
    before = [_under_way(view, request.arena_dir) for view in views]
    for rank, (view, asked_at) in enumerate(zip(views, before, strict=True)):
        if request.full and asked and not topology.independent:
            # The rank passes the request on, so that all save after the same step.
            there = peek(request.arena_dir, view.run_id)
            if there is not None and there.alive:
                asked[rank] = (view, there.pid, asked_at)
            continue
        try:
            asked[rank] = (view, _ask(view, request), asked_at)
        except UsageError as error:
            if error.kind != "no-session" or (not asked and rank + 1 == topology.world):
                raise
    made: dict[int, LiveCheckpoint] = {}
    problem: Unavailable | None = None
    for rank, (view, pid, asked_at) in asked.items():
        try:
            made[rank] = _wait(view, pid, asked_at, request)
        except Unavailable as error:
            problem = error  # perhaps none of its partitions has changed
    if problem is not None and (request.full or not made):
        raise problem
    saved = [(asked[rank][0], one) for rank, one in made.items()]
    made = {
        rank: replace(one, label=_noted(one.label, store, [each]))
        for (rank, one), each in zip(made.items(), saved, strict=True)
    }
    label = Label.over([one.label for one in made.values()])
    if topology.independent:
        label = replace(label, mixed=(MEMBERS,))
    elif label.step is None or len(made) < topology.world:
        label = label.because(PART)
    return LiveRanks(topology.world, made, topology.independent, _noted(label, store, saved))


def _noted(label: Label, store: Store, saved: Sequence[tuple[Store, LiveCheckpoint]]) -> Label:
    """Return the label of these checkpoints, each with its writer's view of the store, and what was saved with them."""
    if not label.of_one:
        return label
    writers, wholes = [], set[str]()
    for view, made in saved:
        state = view.state(view.lane)
        seals = [seal for seal in state.sealed if pack(seal.epoch, seal.step) == made.version]
        wholes.add("" if not seals else seals[-1].whole)
        writers.append(Writer([state]))
    if "" in wholes:
        return replace(label, caveats=(UNKNOWN.format("the store no longer has its record"),))
    if len(wholes) > 1:
        return replace(label, caveats=(NO_COMMIT,))
    return noted(label, store, writers, *wholes)


def _under_way(store: Store, arena_dir: str | None) -> int:
    """Return the version of the current checkpoint. The session saves after its next step: its answer is newer."""
    before = peek(arena_dir, store.run_id)
    if before is None:
        return NEVER
    newest = int(before.version.max(initial=NEVER))
    if newest >= 0:
        return pack(epoch_of(newest), before.head_step)
    # An arena without copies: the first ones answer. Those that a resume gets from the store are of earlier epochs.
    return pack(before.epoch, max(0, before.head_step - 1))


def _ask(store: Store, request: _Request) -> int:
    """Request a checkpoint from a session, and return its process id."""
    wanted = Request("full" if request.full else "partial")
    hint = (
        "run this on the host of a running session; one with daemon=False (SCARCTL_DAEMON=0) cannot be asked"
    )
    return int(_pass_on(request.arena_dir, store.run_id, wanted, hint)["pid"])


def _pass_on(arena_dir: str | None, run: str, request: Request, hint: str) -> dict[str, Any]:
    """Give a request to the daemon, and return its answer. Raises UsageError (`kind` "no-session") without one."""
    try:
        return ask(host_folder(arena_dir), "ask", patience=_PATIENCE, store=run, request=request.to_json())
    except Unavailable as error:
        if error.kind != "no-daemon":
            raise
        raise UsageError(
            "no running session saves to this store through this host's daemon", hint=hint, kind="no-session"
        ) from None


def _wait(store: Store, pid: int, asked_at: int, request: _Request) -> LiveCheckpoint:
    """Wait until a checkpoint newer than version `asked_at` is durable."""
    while True:
        started = time.monotonic()
        found = _look(store, request.arena_dir, asked_at, pid)
        if found is not None and (found.label.of_one or not request.full):
            return found
        now = time.monotonic()
        if now > request.deadline:
            break
        time.sleep(max(_POLL, now - started))  # a large arena takes longer to read
    if found is not None:
        return found
    raise Unavailable(
        f"process {pid} got the request, but no newer checkpoint is durable after {request.timeout:g} s"
        f"{_failing(store, request.arena_dir)}",
        hint="it saves after its next step, if a partition has changed; `scarctl daemon status` shows its step",
    )


def _failing(store: Store, arena_dir: str | None) -> str:
    """Return why the daemon cannot save, as the end of a sentence; "" if it can, or does not say."""
    with suppress(ScarError):
        answer = ask_status(host_folder(arena_dir), patience=_PATIENCE)
        for run in answer["runs"] if answer else []:
            if run["id"] == store.run_id and run.get("last_error"):
                return f". Saving fails, and is retried: {run['last_error']}"
    return ""


def snapshot_live(
    store: Store, name: str, *, timeout: float, arena_dir: str | None
) -> LiveCheckpoint | LiveRanks:
    """Have the session seal the whole state, and make it the snapshot `name`.

    If values are not finite, the result is not whole and there is no snapshot. Raises as `checkpoint_live` and
    `create_snapshot` do.
    """
    check_new_snapshot(store, name)
    for left in reversed(range(_ATTEMPTS)):
        made = checkpoint_live(store, full=True, timeout=timeout, arena_dir=arena_dir, every=True)
        try:
            if made.label.of_one:
                _name(store, made, name)
            return made
        except Unavailable as error:
            # The session may collect a sealed state before it has a name, so the request is repeated.
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
        hint="retry",
        kind="snapshot-late",
    )


def _look(store: Store, arena_dir: str | None, asked_at: int, pid: int) -> LiveCheckpoint | None:
    """Return the durable checkpoint that is newer than version `asked_at`; None before it exists."""
    view = peek(arena_dir, store.run_id)
    if view is None:
        return _closed(store, asked_at, pid)
    if view.sealed > asked_at:
        step = step_of(view.sealed)
        return LiveCheckpoint(pid, view.sealed, view.layout, view.durable, Label(step, step))
    newer = view.durable[view.durable > asked_at]
    if not newer.size:
        return None
    return LiveCheckpoint(pid, int(newer.min()), view.layout, view.durable, Label.of(view.durable, PART))


def _closed(store: Store, asked_at: int, pid: int) -> LiveCheckpoint | None:
    """Return the checkpoint of a session that ended meanwhile. Such a session leaves no arena if all copies are
    durable.

    If the session took no further step, its last version may be as old as the request.
    """
    layout = store.current_layout()
    if layout is None:
        return None
    durable = np.full(layout.partitions, NEVER, dtype=np.int64)
    encoded = False
    for shard in store.shards():
        state = store.state(shard, layout)
        durable[state.ids] = state.version
        encoded |= bool(state.encoded.any())
    version = int(durable.max(initial=NEVER))
    if version < max(asked_at, 0):
        return None
    label = Label.of(durable, *() if not encoded and (durable == version).all() else (PART,))
    return LiveCheckpoint(pid, version, layout, durable, label)


def recover_live(
    store: Store,
    lost: Sequence[str],
    *,
    max_rework: float | None = None,
    timeout: float,
    arena_dir: str | None,
) -> dict[str, Any]:
    """Have a session on this host restore lost parts in place. Return its step, its report and its process id.

    If several ranks save to the store, one of them gets the request. All recover after the same step, and the report is
    that of the first rank. A member recovers alone, and gets the request for its own parts.

    Raises UsageError (`kind` "no-session", or "members-apart" for parts of several members), and the error that the
    session raised. Raises Unavailable if there is no answer after `timeout` seconds.
    """
    topology, folder = newest_topology(store), host_folder(arena_dir)
    if topology is not None and topology.independent:
        runs = [_loser(store, lost).run_id]
    else:
        runs = [store.run_id] if topology is None else [store.of_shard(s).run_id for s in topology.shards]
    request, deadline = (
        Request("recover", lost=tuple(lost), max_rework=max_rework),
        time.monotonic() + timeout,
    )
    hint = "`scarctl recover` restores into a stopped run's arena, or into a file"
    for run in runs:
        try:
            asked = _pass_on(arena_dir, run, request, hint)
        except UsageError as error:
            if error.kind != "no-session" or run == runs[-1]:
                raise
            continue
        while (answer := ask(folder, "answered", store=run, number=asked["number"])["answer"]) is None:
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"process {asked['pid']} got the request, but has not answered after {timeout:g} s",
                    hint="it answers after its next step, or with several ranks after one of the next checkpoints",
                )
            time.sleep(_ANSWER_POLL)
        if "error" in answer:
            raise error_from(answer["error"])
        return {**answer, "pid": asked["pid"]}
    raise AssertionError("unreachable")


def _loser(store: Store, lost: Sequence[str]) -> Store:
    """Return the view of the one member that has the lost parts."""
    state = open_shares(store)
    state, _ = state.only(state.lost(tuple(lost)))
    if len(state.shares) != 1:
        raise UsageError(
            f"{len(state.shares)} members have the lost parts, and each recovers alone",
            hint="name the parts of one member at a time: --lost member:2",
            kind="members-apart",
        )
    return state.shares[0].store
