"""Find damage of the newest copies that records and the sizes of files show. `scarctl verify` reads the data, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scarctl.store.format import segment_path, shard_folder
from scarctl.store.shard_state import ShardState
from scarctl.store.store import Store

_ATTEMPTS = 3
"""Most looks at a shard whose writer collects meanwhile."""


@dataclass(frozen=True, slots=True)
class VisibleDamage:
    """Damaged files of one shard. `lost` marks the members whose newest copy is in one of them."""

    files: dict[str, str] = field(default_factory=dict)
    """The reason by file."""
    lost: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))


def visible_damage(store: Store, states: Mapping[int, ShardState]) -> dict[int, VisibleDamage]:
    """Return the damage of each shard that has any. Lists files, and reads no data.

    Raises Corruption, AccessDenied, Unavailable.
    """
    found = {}
    shards = [shard for shard, state in states.items() if state.layout is not None]
    listed = store.blobs.each(store.blobs.files, [f"{shard_folder(shard)}/seg" for shard in shards])
    for shard, sizes in zip(shards, listed, strict=True):
        state, missing = states[shard], _missing(states[shard], dict(sizes))
        if missing:
            state, missing = _still_missing(store, state, missing)
        files = {
            store.blobs.where(segment_path(shard, state.segments[number].name)): reason
            for number, reason in missing.items()
        }
        if state.doubt.any():
            files |= {damage.file: damage.why for damage in state.damaged}
        if files:
            found[shard] = VisibleDamage(files, np.isin(state.segment, list(missing)) & state.saved)
    return found


def _still_missing(
    store: Store, state: ShardState, missing: dict[int, str]
) -> tuple[ShardState, dict[int, str]]:
    """Return the newest state and its missing segments, except those that a writer collected since `state` was read.

    A writer deletes a segment after the record that supersedes it. So it is damage if there is no newer record.
    """
    for _ in range(_ATTEMPTS):
        fresh = store.state(state.shard, around=True)
        if fresh.seq == state.seq:
            return state, missing
        state, missing = fresh, _missing(fresh, dict(store.blobs.files(f"{shard_folder(state.shard)}/seg")))
        if not missing:
            break
    return state, {}  # even a busy writer does not collect segments that it needs


def _missing(state: ShardState, sizes: Mapping[str, int]) -> dict[int, str]:
    """Return the reason for each segment that the newest copies or extras need and that is not there as recorded."""
    needed = set(np.unique(state.segment[state.saved]).tolist())
    if state.extras is not None:
        needed.add(state.extras[1])
    missing = {}
    for number in sorted(needed):
        segment = state.segments[number]
        size = sizes.get(segment.name)
        if size is None:
            missing[number] = "the segment is missing"
        elif size != segment.nbytes:
            missing[number] = f"it has {size} bytes, its record says {segment.nbytes}"
    return missing
