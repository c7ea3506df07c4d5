"""Save one partial checkpoint of a state file, for training loops in any language: no session, no daemon.

The state is compared with the last saved values. These come from the memory of a stopped run if it has them, otherwise
from the store, which is then read completely. The policy's own state (unused budget, the cursor of "round") is saved
in the extras of the newest commit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scarctl.arena.arena import Arena
from scarctl.arena.kinship import open_stopped
from scarctl.config import DEFAULT_POLICY, check_fixed, check_fraction, check_policy
from scarctl.errors import Corruption, NoStore, ScarError, SettingsConflict, UsageError
from scarctl.formats.state_file import StateFile
from scarctl.policy.select import Candidates, select, squared
from scarctl.state.extras import FILE_POLICY, PolicyMemory
from scarctl.state.label import PART, Label, Labelled
from scarctl.state.layout import Layout, build_layout
from scarctl.state.version import MAX_STEP, pack, step_of
from scarctl.store import (
    Collector,
    ShardState,
    Store,
    StoreWriter,
    create_snapshot,
    open_writer,
    sealed_sets,
)
from scarctl.store.backing import check_cut
from scarctl.store.snapshot import check_new_snapshot, check_snapshot_name
from scarctl.store.topology import refuse_ranks
from scarctl.util.arrays import Ids, take_rows
from scarctl.util.document import INLINE, INTERNAL, Document

if TYPE_CHECKING:
    from scarctl.checkpoint.live_state import LiveState

log = logging.getLogger("scarctl")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSettings:
    """Settings for saving one state file."""

    store: str = field(repr=False)
    """Folder of the store, or an address such as `s3://bucket/folder`. The first checkpoint creates it."""
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    """Options of a remote store's file system. They may be secret."""
    assume_single_writer: bool = False
    """Create the store even if the place cannot create files exclusively."""
    step: int
    """Iterations of the loop when the state was written. It must not decrease from call to call."""
    fraction: float = 1 / 8
    """Fraction of the state's bytes that this checkpoint may write, in (0, 1]."""
    policy: str = DEFAULT_POLICY
    """Rule that selects partitions: see `scarctl.Selection`."""
    shards: int | None = None
    """Number of shards. Fixed by the first checkpoint (None: 1, or the store's)."""
    partition_bytes: int | None = None
    """Size of a partition in bytes. Fixed by the first checkpoint (None: from the state's size, or the store's)."""
    arena_dir: str | None = None
    """Folder of arenas, None for the default."""
    snapshot: str | None = None
    """Save the whole state, and keep it as a snapshot of this name."""

    def __post_init__(self) -> None:
        if not 0 <= self.step <= MAX_STEP:
            raise UsageError(f"the step is {self.step}, not in 0..{MAX_STEP}", hint="count iterations from 0")
        if self.snapshot is not None:
            check_snapshot_name(self.snapshot)
        check_fraction(self.fraction)
        check_policy(self.policy)
        check_fixed(self.shards, self.partition_bytes)


@dataclass(frozen=True, slots=True)
class Checkpoint(Document, Labelled):
    """Report of a checkpoint, or of a dry run."""

    step: int
    total_partitions: int
    saved_partitions: int
    total_bytes: int
    saved_bytes: int
    """Bytes of the saved partitions' tensors."""
    seq: dict[int, int]
    """Number of the newest record, by shard. Empty for a dry run."""
    durable: bool
    label: Label = field(metadata=INLINE)
    """The label of the state in the store."""
    nonfinite_partitions: int
    """Number of partitions with values that are not finite."""
    policy: str
    dry_run: bool
    left_out: tuple[str, ...] = field(default=(), metadata=INTERNAL)
    """Names of the first few of these partitions whose last good copy was kept."""
    left_out_partitions: int = 0
    damaged: tuple[str, ...] = field(default=(), metadata=INTERNAL)
    """Faults of unreadable copies in the store, whose partitions were saved again."""
    snapshot: str | None = None
    """Name of the snapshot that was created."""
    credit: int = 0
    """Bytes of unused budget that the next checkpoint may use in addition to its own."""


@dataclass(slots=True)
class _Choice:
    """The partitions to save, and the policy's state."""

    ids: Ids
    unchanged: NDArray[np.bool_]
    """Partitions equal to their newest copy in every byte."""
    nonfinite: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    left_out: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    memory: PolicyMemory = field(default_factory=lambda: PolicyMemory(seed=0))
    extras: Mapping[str, Any] = field(default_factory=dict)
    """The newest extras, which a session may have saved; they are kept."""
    version: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Versions of the store's copies before; empty if all are replaced."""


def checkpoint(state: StateFile, settings: CheckpointSettings, *, dry_run: bool = False) -> Checkpoint:
    """Save the part of `state` that changed most. The first checkpoint of a store saves all of it.

    Raises LayoutMismatch, SettingsConflict, UsageError (the step decreases), NoStore (kind "foreign-store"),
    Contention, AccessDenied, Unavailable. After an error the store is readable at its last acknowledged commit.
    """
    store, layout = _open(state, settings, dry_run=dry_run)
    if store is None:
        return _result(layout, settings, _everything(layout), {}, durable=False)
    stored = store.state(store.lane, layout)
    _check_step(settings.step, stored)
    if settings.snapshot is not None:
        check_new_snapshot(store, settings.snapshot)
        settings = replace(settings, policy="full")
    if dry_run:
        live, damaged = _load(state, store, layout, stored, settings)
        choice = _choose(live, stored, settings, store)
        return _result(layout, settings, choice, {}, durable=False, damaged=damaged)
    with open_writer(store, layout=layout) as writer:
        _check_step(settings.step, writer.state)
        live, damaged = _load(state, store, layout, writer.state, settings)
        choice = _choose(live, writer.state, settings, store)
        live.save(choice.ids, live.arena.slot, pack(writer.epoch, settings.step), 1)
        collector = Collector(writer)
        seq = _commit(writer, live.arena, choice, settings)
        snapshot = None
        if settings.snapshot is not None and not choice.left_out.size:
            newest = sealed_sets([writer.state])[0]
            snapshot = create_snapshot(store, settings.snapshot, newest).name
        _collect(collector)
    return _result(layout, settings, choice, seq, durable=True, damaged=damaged, snapshot=snapshot)


def _collect(collector: Collector) -> None:
    """Collect old copies. The checkpoint is durable already, so a failure is only logged: it costs space."""
    try:
        collector.settle()
    except ScarError as error:
        log.warning("collecting old copies failed: %s", error)


def _open(state: StateFile, settings: CheckpointSettings, *, dry_run: bool) -> tuple[Store | None, Layout]:
    """Open or create the store, and return it with the state's layout. A dry run creates nothing: None instead."""
    try:
        store = Store.open(settings.store, storage_options=settings.storage_options)
    except NoStore as error:
        if error.kind != NoStore.kind:
            raise
        # Raises before anything is created.
        layout = build_layout(state.groups(), partition_bytes=settings.partition_bytes)
        if dry_run:
            return None, layout
        store = Store.create(
            settings.store,
            shards=settings.shards,
            partition_bytes=settings.partition_bytes,
            storage_options=settings.storage_options,
            assume_single_writer=settings.assume_single_writer,
        )
    refuse_ranks(store)
    fixed = store.settings
    for name in ("shards", "partition_bytes"):
        given, own = getattr(settings, name), getattr(fixed, name)
        if given is not None and given != own:
            raise SettingsConflict(
                f"{store.where}: {name} is {'automatic' if own is None else own} in this store, not {given}",
                hint="omit the option, or create another store in another folder",
            )
    layout = fixed.layout(state.groups())
    current = store.current_layout()
    if current is not None and current != layout:
        raise store.mismatch(current, layout)
    check_cut(store, layout, asked=settings.partition_bytes is not None)
    return store, layout


def _check_step(step: int, stored: ShardState) -> None:
    if step < stored.step:
        raise UsageError(
            f"step {step} is before step {stored.step}, the newest in this store",
            hint="steps must not decrease; before continuing from an older state run `scarctl recover --mode rollback`",
            kind="step-goes-back",
        )


def _load(
    state: StateFile,
    store: Store,
    layout: Layout,
    stored: ShardState,
    settings: CheckpointSettings,
) -> tuple[LiveState, tuple[str, ...]]:
    """Load the state and its last saved values. An unreadable copy has version -1; the reasons are returned, too."""
    from scarctl.checkpoint.live_state import LiveState

    saved = Arena.anonymous(layout)
    newest = np.full(layout.partitions, -1, dtype=np.int64)
    known = stored.saved & ~stored.doubt
    newest[stored.ids[known]] = stored.version[known]
    run = open_stopped(settings.arena_dir, store)
    if run is not None:
        try:
            if run.layout == layout:
                # A pending copy may have the store's version, and other values.
                same = (run.version == newest) & (run.durable == newest)
                _copy(run, saved, np.flatnonzero(run.intact() & same & (newest >= 0)))
        finally:
            run.close()
    corrupt: list[tuple[Ids, str]] = []
    ids = np.flatnonzero((newest >= 0) & (saved.version < 0))
    for batch in store.read(stored, ids, corrupt=corrupt):
        rows = take_rows(*layout.row_ranges(batch.ids))
        for t, data in enumerate(batch.tensors):
            saved.rows(batch.group, t)[rows] = data
        saved.version[batch.ids] = newest[batch.ids]
    tensors = [[state.tensor(group.name)] for group in layout.groups]
    return LiveState(layout, tensors, saved), tuple(dict.fromkeys(reason for _, reason in corrupt))


def _copy(source: Arena, target: Arena, ids: Ids) -> None:
    layout = target.layout
    bounds = np.searchsorted(ids, layout.base)
    for g, group in enumerate(layout.groups):
        mine = ids[bounds[g] : bounds[g + 1]]
        if mine.size:
            rows = take_rows(*layout.row_ranges(mine))
            for t in range(len(group.tensors)):
                target.rows(g, t)[rows] = source.rows(g, t)[rows]
    target.version[ids] = source.version[ids]


def _choose(live: LiveState, stored: ShardState, settings: CheckpointSettings, store: Store) -> _Choice:
    """Select the partitions to save. A partition without a readable copy is always saved, even beyond the budget."""
    layout, version = live.layout, live.arena.version
    missing = version < 0
    distance = live.distances()
    finite = np.isfinite(distance)
    if missing.all():
        choice = _everything(layout)
        choice.nonfinite = np.flatnonzero(~finite)
        return choice
    extras = _extras(store, stored)
    memory = PolicyMemory.from_tree(extras.get(FILE_POLICY))
    among = Candidates(
        distance_sq=squared(distance),
        nbytes=layout.partition_bytes,
        staleness=np.maximum(settings.step - step_of(version), 0),
        eligible=~missing,
        seed=store.settings.seed if memory.seed is None else memory.seed,
        step=settings.step,
    )
    budget = int(settings.fraction * layout.nbytes)
    picked = select(settings.policy, among, budget, credit=memory.credit, cursor=memory.cursor)
    ids = np.union1d(picked.ids, np.flatnonzero(missing))
    left_out = np.flatnonzero(~finite & ~missing)
    memory = PolicyMemory(picked.credit, picked.cursor, store.settings.seed)
    unchanged = ~live.changed() & ~missing
    unchanged[stored.ids] &= ~stored.encoded  # an encoded copy is never sealed
    nonfinite = np.flatnonzero(~finite)
    return _Choice(ids, unchanged, nonfinite, left_out, memory, extras, version.copy())


def _everything(layout: Layout) -> _Choice:
    return _Choice(np.arange(layout.partitions, dtype=np.int64), np.zeros(layout.partitions, dtype=bool))


def _extras(store: Store, stored: ShardState) -> dict[str, Any]:
    """Return the newest extras, {} if no extras were saved or can be read."""
    try:
        newest = store.read_extras(stored)
    except Corruption:
        return {}  # damaged extras only affect the selection: `verify` reports the damage
    return newest[1] if newest is not None and isinstance(newest[1], dict) else {}


def _commit(
    writer: StoreWriter, arena: Arena, choice: _Choice, settings: CheckpointSettings
) -> dict[int, int]:
    """Commit the selected partitions; sealed if all others are unchanged. Return the record's number."""
    done = choice.unchanged.copy()
    done[choice.ids] = True
    # If nothing fits into the budget, there is still a commit, which saves the credit for the next call.
    record = writer.commit(
        choice.ids,
        arena.slot.source,
        step=settings.step,
        sealed=bool(done.all()),
        extras={**choice.extras, FILE_POLICY: choice.memory.to_tree()},
    )
    return {writer.shard: record.seq}


def _result(
    layout: Layout,
    settings: CheckpointSettings,
    choice: _Choice,
    seq: dict[int, int],
    *,
    durable: bool,
    damaged: tuple[str, ...] = (),
    snapshot: str | None = None,
) -> Checkpoint:
    done = choice.unchanged.copy()
    done[choice.ids] = True
    label = Label(settings.step, settings.step)
    if not done.all():
        choice.version[choice.ids] = pack(1, settings.step)
        label = Label.of(choice.version, PART)
    return Checkpoint(
        step=settings.step,
        total_partitions=layout.partitions,
        saved_partitions=len(choice.ids),
        total_bytes=layout.nbytes,
        saved_bytes=int(layout.partition_bytes[choice.ids].sum()),
        seq=seq,
        durable=durable,
        label=label,
        nonfinite_partitions=len(choice.nonfinite),
        left_out=tuple(layout.name(int(i)) for i in choice.left_out[:5]),
        left_out_partitions=len(choice.left_out),
        policy="full" if settings.snapshot is not None else settings.policy,
        dry_run=not durable,
        damaged=damaged,
        credit=choice.memory.credit,
        snapshot=snapshot,
    )
