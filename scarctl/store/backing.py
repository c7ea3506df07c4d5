"""Bound what a store's files can back: a layout of a few bytes may claim any number of partitions.

Every member of a shard takes bytes in a file whose checksum was verified. A layout that claims far more partitions than
all shards have members is refused before an array over its partitions is allocated.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import UsageError
from scarctl.state.layout import MIN_PARTITION_BYTES, Layout
from scarctl.store.format import corrupt, layout_path
from scarctl.store.shard_state import ShardState
from scarctl.store.store import Store

FREE = 1 << 20
"""Partitions that no file needs to back: arrays over them take some tens of MiB."""


def check_backed(store: Store, states: Iterable[ShardState]) -> None:
    """Raise Corruption if a layout of these states has more partitions than members, and more than `FREE`.

    While a store is empty, it may be in that state between the openings of two shards.
    """
    members: dict[Layout, int] = {}
    for state in states:
        if state.layout is not None and state.layout.partitions > FREE:
            members[state.layout] = members.get(state.layout, 0) + len(state.ids)
    for layout, count in members.items():
        if layout.partitions > FREE + count:
            raise corrupt(
                store.blobs.where(layout_path(layout.digest)),
                f"it claims {layout.partitions} partitions, but the store's shards have {count}",
            )


def check_cut(store: Store, layout: Layout, *, asked: bool) -> None:
    """Raise UsageError if only the store demands that a state is cut into far more partitions than it has saved.

    asked: whether the caller has given the size of partitions, too. A store of one rank is not checked.
    """
    free = FREE + layout.nbytes // MIN_PARTITION_BYTES
    if asked or store.part is not None or layout.partitions <= free:
        return
    members = sum(len(state.ids) for state in store.states(store.shards()).values())
    if layout.partitions > free + members:
        raise UsageError(
            f"{store.where} cuts this state into {layout.partitions} partitions, but has only {members} of them",
            hint="if that is right, give the size of partitions yourself, as when the store was created",
            kind="unasked-partitions",
        )


def backed_shards(store: Store, layout: Layout) -> NDArray[np.int32]:
    """Return the shard of every partition (`Store.shard_of`), once `check_backed` has passed.

    Reads states only if the layout is large. Raises as `check_backed` does.
    """
    if layout.partitions > FREE:
        check_backed(store, store.states(store.shards(), around=True).values())
    return store.shard_of(layout)
