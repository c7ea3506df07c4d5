"""Start checkpointing a training loop's model and optimizer: `attach`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from scarctl.adapter import Adapter, find_adapter
from scarctl.config import (
    Extra,
    Hooks,
    Member,
    Partitioning,
    Ranks,
    Selection,
    SessionSettings,
    Settings,
    flatten,
)
from scarctl.config.environment import REHEARSAL, warn_of_unread
from scarctl.config.unknown import explains_options
from scarctl.errors import UsageError
from scarctl.session.attached import take_over
from scarctl.session.peers import WrittenByRanks
from scarctl.session.session import Session
from scarctl.store.verdict import bring_verdict
from scarctl.util.collection import without_collection
from scarctl.util.ranks import is_rank, world_size


@explains_options
@without_collection()
def attach(
    model: Any,
    optimizer: Any = None,
    *,
    store: str | os.PathLike[str] | None = None,
    fraction: float | None = None,
    interval: int | Literal["auto"] | None = None,
    partitioning: Partitioning | None = None,
    selection: Selection | None = None,
    schedulers: Any = (),
    scaler: Any = None,
    extras: Mapping[str, Any] | None = None,
    ranks: bool | Ranks | None = None,
    member: tuple[int, int] | Member | None = None,
    hooks: Hooks = "auto",
    settings: Settings | None = None,
) -> Session:
    """Checkpoint `model` and its optimizer from now on, and return the `Session`.

    An option that is not given comes from the environment (`SCARCTL_INTERVAL`), then from `scarctl.toml` in the current
    folder, then from its default.

    model: An `nn.Module`, or a dict of numpy arrays.
    optimizer: A `torch.optim.Optimizer`, or several in the order in which they step. The last one ends an iteration.
    store: Folder of the store, or an address such as s3://bucket/folder. It is created if it does not exist.
    fraction: Largest share of the state's bytes that one partial checkpoint writes, above 0 and up to 1 (the paper's
        r). Default: 1/8.
    interval: Iterations between two partial checkpoints in the store (the paper's rC), or "auto": the whole state every
        `max_lag` seconds if the store can take it, otherwise what changed most, as fast as it can. Memory has its own
        pace: see `overhead` and `max_loss` of `Settings`. Default: "auto".
    partitioning: How the state is divided; fixed when the store is created. See `scarctl.Partitioning`.
    selection: Which partitions a checkpoint saves. See `scarctl.Selection`.
    schedulers: Learning-rate schedulers, one or a list.
    scaler: Gradient scaler.
    extras: More objects with a state by name: with state_dict() and load_state_dict(), a dict, or a random number
        generator. They are read when a step's end is declared (docs/loops.md), and are expected to be the same on all
        ranks; `scarctl.Extra` marks exceptions.
    ranks: Save together with all ranks of `torch.distributed`, which all have to attach. `scarctl.Ranks` names
        parameters that they keep equal. False: this process saves alone, such as rank 0 of a data-parallel job.
        Default: together, if there are several.
    member: (k, n): this process is member k of n, which share the store and nothing else. Each starts, dies and starts
        again alone, as actors, pods and parameter servers do, and saves to its own shard. `scarctl.Member` lets their
        number change. Default: no member.
    hooks: "auto" hooks into the optimizers' steps. "begin" hooks only into their beginnings; call `session.step()` when
        the iteration that they belong to is over. "off": call `session.step()` at the end of every iteration.
    settings: How saving behaves in this process and on this host. See `scarctl.Settings`.

    Raises UsageError (arguments), NoStore (`kind` "foreign-store"), SettingsConflict, Contention, AccessDenied,
    MissingGuarantee, Unavailable. From the first step on, saving raises nothing unless `on_error` is "raise".
    """
    if hooks not in get_args(Hooks):
        raise UsageError(f"hooks is {hooks!r}", hint=f"use one of {', '.join(get_args(Hooks))}")
    given = {
        "store": _path("store", store),
        "fraction": fraction,
        "interval": interval,
        **flatten(partitioning=partitioning, selection=selection, settings=settings),
    }
    given["arena_dir"] = _path("arena_dir", given.get("arena_dir"))
    resolved = SessionSettings.resolve(given, environ=os.environ)
    warn_of_unread(os.environ)
    watcher = None
    if REHEARSAL in os.environ:
        from scarctl.rehearse.watcher import watcher_of

        watcher = watcher_of(os.environ)
    if watcher is not None:
        resolved = watcher.settings(resolved)
    named = _by_name(extras)
    adapter = find_adapter(
        model,
        _as_list(optimizer),
        schedulers=_as_list(schedulers),
        scaler=scaler,
        extras={name: extra.value for name, extra in named.items()},
        replicated=_replicated(ranks),
    )
    session = _session(adapter, resolved, named, ranks, member, hooks if adapter.automatic else "off")
    if watcher is not None:
        watcher.follow(session, adapter, model, _as_list(optimizer))
    else:
        bring_verdict(session.store)
    return session


def _session(
    adapter: Adapter,
    resolved: SessionSettings,
    named: Mapping[str, Extra],
    ranks: bool | Ranks | None,
    member: tuple[int, int] | Member | None,
    hooks: Hooks,
) -> Session:
    """Return the session of a process that trains alone, of a member, or of a rank."""
    per_rank = frozenset(name for name, extra in named.items() if extra.per_rank)
    alone = None
    if member is not None:
        from scarctl.distributed.members import Membership, member_of

        alone = Membership(member_of(member), adapter, per_rank)
    if alone is not None and ranks:
        raise UsageError("a member saves without the other ranks", hint="leave out ranks, or member")
    together = ranks is not False and alone is None
    several = together and world_size() > 1
    if (ranks is False or alone is not None) and any(group.place is not None for group in adapter.groups()):
        raise UsageError(
            "the model is sharded: one rank alone has only a part of it",
            hint="leave out ranks=False" if alone is None else "leave out member: its ranks save together",
        )
    if alone is not None:
        take_over(resolved.store, alone.rank)
        return Session(alone.adapter, resolved, hooks=hooks, together=alone)
    if not several:
        take_over(resolved.store)
        try:
            # An elastic job may start, or continue, with one rank, which has no peers yet.
            if not (together and resolved.peers and is_rank()):
                return Session(adapter, resolved, hooks=hooks)
        except WrittenByRanks:
            if ranks is False:
                raise
    from scarctl.distributed.collectives import Solo, Team
    from scarctl.distributed.coordinator import RankCoordinator

    team = Team() if several else Solo()
    try:
        coordinator = RankCoordinator.join(adapter, resolved, team, per_rank)
    except BaseException:
        team.close()
        raise
    return Session(coordinator.adapter, resolved, hooks=hooks, together=coordinator)


def _by_name(extras: Mapping[str, Any] | None) -> dict[str, Extra]:
    """Return all extras wrapped. Raises UsageError unless they are None or a dict with strings as keys."""
    if extras is None:
        return {}
    if not (isinstance(extras, Mapping) and all(isinstance(name, str) for name in extras)):
        raise UsageError(f"extras is not a dict of objects by name: {extras!r:.80}")
    return {name: item if isinstance(item, Extra) else Extra(item) for name, item in extras.items()}


def _replicated(ranks: object) -> Sequence[str]:
    """Return the patterns of `ranks`. Raises UsageError for another type."""
    if ranks is None or isinstance(ranks, bool):
        return []
    if not isinstance(ranks, Ranks):
        raise UsageError(f"ranks is {ranks!r:.80}", hint="give True, False or scarctl.Ranks(...)")
    patterns = _as_list(ranks.replicated)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise UsageError(f"replicated is not a list of patterns of names: {ranks.replicated!r:.80}")
    return patterns


def _path(name: str, value: object) -> str | None:
    if value is not None and not isinstance(value, str | os.PathLike):
        raise UsageError(f"{name} is {value!r:.80}, not a folder or an address")
    return None if value is None else os.fspath(value)


def _as_list(value: Any) -> Sequence[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
