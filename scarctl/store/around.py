"""Read around damaged records: what the other records of a log still say (docs/FORMAT.md, section 7)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from scarctl.state.layout import Layout
from scarctl.store.shard_state import ShardState
from scarctl.store.store import Store


def state_around(store: Store, shard: int, layout: Layout | None = None, at: int | None = None) -> ShardState:
    """Return the state of a shard after record `at`, the newest by default, as far as damaged records permit.

    All members are in doubt that no record after a damaged one holds, so nothing of them is exact. Only readers may use
    such a state: a writer needs every record. Raises as `Store.state` does.
    """
    state = store.log(shard).state(at, around=True)
    if layout is not None and state.layout is not None and state.layout.digest != layout.digest:
        raise store.mismatch(state.layout, layout)
    return state


def states_around(
    store: Store, shards: Iterable[int], layout: Layout | None = None, at: Mapping[int, int] | None = None
) -> dict[int, ShardState]:
    """Return the states of several shards, by shard: see `state_around`."""
    shards = list(shards)
    found = store.blobs.each(lambda s: state_around(store, s, layout, None if at is None else at[s]), shards)
    return dict(zip(shards, found, strict=True))


def layout_around(store: Store) -> Layout | None:
    """Return the layout of the newest readable records; None before the first. Raises Corruption."""
    logs = [store.log(shard) for shard in store.shards()]
    found = store.blobs.each(lambda log: log.newest_readable() or log.newest(), logs)
    record = max((one for one in found if one is not None), key=lambda one: one.epoch, default=None)
    if record is None:
        states_around(store, store.shards())  # an empty log may have lost its records
    return None if record is None else store.layout(record.layout)
