"""`attach`: puts scarctl beside a training loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from scarctl.adapter import find_adapter
from scarctl.attached import take_over
from scarctl.config import SessionSettings
from scarctl.errors import UsageError
from scarctl.ranks.crew import Crew
from scarctl.ranks.team import Solo, Team, world_size
from scarctl.session import Session
from scarctl.together import WrittenByRanks


def attach(
    model: Any,
    optimizer: Any = None,
    *,
    store: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    assume_single_writer: bool | None = None,
    fraction: float | None = None,
    interval: int | Literal["auto"] | None = None,
    max_bandwidth: float | None = None,
    policy: str | None = None,
    norm: str | Callable[..., Any] | None = None,
    tracker: str | None = None,
    max_staleness: int | None = None,
    extrapolate: bool | None = None,
    shards: int | None = None,
    seed: int | None = None,
    partition_bytes: int | None = None,
    by_layer: bool | None = None,
    rows: Mapping[str, int] | None = None,
    schedulers: Any = (),
    scaler: Any = None,
    extras: Mapping[str, Any] | None = None,
    rank_extras: Mapping[str, Any] | None = None,
    after_step: Mapping[str, Any] | None = None,
    replicated: Sequence[str] = (),
    ranks: bool | None = None,
    auto: bool | Literal["begin"] = True,
    flush_on_signal: bool | None = None,
    on_error: str | None = None,
    daemon: bool | None = None,
    arena_dir: str | os.PathLike[str] | None = None,
    pin_memory: bool | None = None,
    validate: bool | None = None,
    drain_timeout: float | None = None,
) -> Session:
    """Checkpoint `model` and its optimizer from now on; returns the `Session`.

    model: an `nn.Module`, or a dict of numpy arrays.
    optimizer: a `torch.optim.Optimizer`, or several in the order in which they step: the last one ends an iteration.
    store: folder of the store, or an address such as s3://bucket/folder; made if it is not there. SCARCTL_STORE and
        `scarctl.toml` may name it instead.
    storage_options: for the file system of a remote store: endpoint_url, key, secret, ... Never shown or written down.
    assume_single_writer: make the store also where nothing can be created exclusively.
    fraction: largest share of the state's bytes that one partial checkpoint may write (the paper's r).
    interval: iterations between two partial checkpoints (the paper's rC), or "auto": as often as the store keeps up,
        and smaller ones, down to an eighth of `fraction`, where that would be rare. Of several ranks, which save at
        the same steps, the slowest sets the interval.
    max_bandwidth: bytes per second that an "auto" interval may write on average; of several ranks, each of them.
    policy: "priority", "round", "random" or "full".
    norm: "l2", "rms", "relative", or a function (see `scarctl.distance`).
    tracker: how distances are found: "overlapped" compares all values, a part after every iteration, and nobody waits
        for it; "exact" at the checkpoint; "sampled" a changing few of every large partition, "touched" those rows of
        embedding tables that get gradients; "auto" takes for each tensor what costs least.
    max_staleness: iterations after which a changed partition is saved before all others.
    extrapolate: a partial recovery restores parameters not as they were saved, but further along the way that they
        went before, as far as that would have helped at the checkpoints so far (see `scarctl.extrapolation`).
    shards, seed: split the state at random into that many parts that fail together.
    partition_bytes, by_layer, rows: size of a partition; fixed, like shards and seed, when the store is created.
    schedulers, scaler: learning-rate schedulers and gradient scaler; read when the loop is done with a step.
    extras: more objects with a state (state_dict(), a dict, a random number generator); read right after a step.
        Where several ranks train together they are the same on all of them.
    rank_extras: such objects that are each rank's own.
    after_step: objects with a state that the loop changes after the optimizer's step, such as an average of the model.
        They are read when the loop is done with the step. A loop over `Session.batches` may pass them in `extras`.
    replicated: patterns of names ("router.*") of parameters that all ranks keep equal by other means than
        DistributedDataParallel or DTensor: each byte of them is saved once. All others count as each rank's own.
    ranks: save together with all ranks of `torch.distributed`, which all have to attach: by default where there are
        several. False: this process on its own, such as rank 0 of a data-parallel job.
    auto: hook into the optimizers' steps; False: call `session.step()` at the end of every iteration; "begin": hook
        only into where steps begin, and say with `session.step()` when the iteration that they are part of is over.
    flush_on_signal: on SIGTERM and SIGINT bring the newest step into this host's memory first (see `Session.flush`).
        For that, extras are read and small buffers copied after every step. Only from the main thread.
    on_error: "warn" logs and counts a fault while saving, "raise" raises it from the training loop.
    daemon: save from the host's daemon, which outlives this process; False: from a thread of this process. By default
        the daemon, or the thread, with a warning, where it cannot be started.
    arena_dir: folder for the arena instead of shared memory.
    pin_memory: pin the arena where the state is on a GPU: copies are faster, and the arena cannot be swapped out.
    validate: prove after every copy that it is not torn, at the price of cloning the state.
    drain_timeout: seconds that `close` waits for the store.

    Raises UsageError (arguments), NoStore (`kind` "foreign-store"), SettingsConflict, Contention, AccessDenied,
    MissingGuarantee, Unavailable. From the first step on, saving raises nothing unless `on_error="raise"`.
    """
    given = {
        "store": _path("store", store),
        "storage_options": storage_options,
        "assume_single_writer": assume_single_writer,
        "fraction": fraction,
        "interval": interval,
        "max_bandwidth": max_bandwidth,
        "policy": policy,
        "norm": norm,
        "tracker": tracker,
        "max_staleness": max_staleness,
        "extrapolate": extrapolate,
        "shards": shards,
        "seed": seed,
        "partition_bytes": partition_bytes,
        "by_layer": by_layer,
        "rows": rows,
        "flush_on_signal": flush_on_signal,
        "on_error": on_error,
        "daemon": daemon,
        "arena_dir": _path("arena_dir", arena_dir),
        "pin_memory": pin_memory,
        "validate": validate,
        "drain_timeout": drain_timeout,
    }
    for name, value in {"extras": extras, "rank_extras": rank_extras}.items():
        if value is not None and not (
            isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
        ):
            raise UsageError(f"{name} is no dict of objects by name: {value!r:.80}")
    if auto not in (True, False, "begin"):
        raise UsageError(f'auto is {auto!r}, not True, False or "begin"')
    if not all(isinstance(pattern, str) for pattern in _as_list(replicated)):
        raise UsageError(f"replicated is no list of patterns of names: {replicated!r:.80}")
    settings = SessionSettings.resolve(given, environ=os.environ)
    both = sorted(set(extras or {}) & set(rank_extras or {}))
    if both:
        raise UsageError(f"{both[0]!r} is in extras and in rank_extras", hint="leave it out of one of them")
    adapter = find_adapter(
        model,
        _as_list(optimizer),
        schedulers=_as_list(schedulers),
        scaler=scaler,
        extras={**(extras or {}), **(rank_extras or {})},
        replicated=_as_list(replicated),
        **({"after_step": after_step} if after_step else {}),
    )
    auto = auto if adapter.automatic else False
    several = world_size() > 1 and ranks is not False
    if ranks is False and any(group.place is not None for group in adapter.groups()):
        raise UsageError(
            "the model is sharded: one rank alone has only a part of it", hint="leave out ranks=False"
        )
    if not several:
        take_over(settings.store)
        try:
            return Session(adapter, settings, auto=auto)
        except WrittenByRanks:
            if ranks is False:
                raise
    team = Team() if several else Solo()
    try:
        crew = Crew.join(adapter, settings, team, frozenset(rank_extras or ()))
    except BaseException:
        team.close()
        raise
    return Session(crew.adapter, settings, auto=auto, together=crew)


def _path(name: str, value: str | os.PathLike[str] | None) -> str | None:
    if value is not None and not isinstance(value, str | os.PathLike):
        raise UsageError(f"{name} is {value!r:.80}, not a folder or an address")
    return None if value is None else os.fspath(value)


def _as_list(value: Any) -> Sequence[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
