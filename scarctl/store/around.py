"""Read around damaged records: what the other records of a log still say (docs/FORMAT.md, section 7)."""

from __future__ import annotations

from scarctl.errors import Corruption
from scarctl.state.layout import Layout
from scarctl.store.shard_state import ShardState
from scarctl.store.store import Store


def state_around(store: Store, shard: int, layout: Layout | None = None) -> ShardState:
    """Return a shard's newest state. If a record is damaged, all members are in doubt that no later record holds.

    So nothing of it is exact. Only readers may use it: a writer needs every record. Raises as `Store.state` does.
    """
    try:
        return store.state(shard, layout)
    except Corruption as error:
        if error.kind != Corruption.kind:
            raise
    state = store.log(shard).state(around=True)
    if layout is not None and state.layout is not None and state.layout.digest != layout.digest:
        raise store.mismatch(state.layout, layout)
    return state


def layout_around(store: Store) -> Layout | None:
    """Return the layout of the newest readable records; None before the first. Raises Corruption."""
    logs = [store.log(shard) for shard in store.shards()]
    found = store.blobs.each(lambda log: log.newest_readable() or log.newest(), logs)
    record = max((one for one in found if one is not None), key=lambda one: one.epoch, default=None)
    return None if record is None else store.layout(record.layout)
