"""Count the files and bytes of a store."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from scarctl.store.format import HOSTS, SETTINGS, SNAPSHOTS, TOPOLOGIES, log_folder, shard_folder
from scarctl.store.shard_state import ShardState
from scarctl.store.store import Store


def usage(store: Store, states: Iterable[ShardState] = ()) -> dict[str, int]:
    """Return `bytes` of all files, `live_bytes` of newest copies, numbers of `segments` and of `records`.

    states: those of which the live bytes are counted.
    """
    blobs, shards = store.blobs, store.shards()
    folders = ["layout", SNAPSHOTS, TOPOLOGIES, HOSTS]
    folders += [f"{shard_folder(shard)}/{name}" for shard in shards for name in ("seg", "terms")]
    logs = blobs.each(lambda shard: store.log(shard).logs(), shards)
    folders += [log_folder(shard, *term) for shard, terms in zip(shards, logs, strict=True) for term in terms]
    total = segments = records = live = 0
    for folder, files in zip(folders, blobs.each(blobs.files, folders), strict=True):
        total += sum(size for _, size in files)
        segments += len(files) if folder.endswith("/seg") else 0
        records += len(files) if "/log/" in folder else 0
    with blobs.reader(SETTINGS) as file:
        total += file.size
    for state in states:
        if state.layout is not None:
            live += int(state.bytes_of(np.flatnonzero(state.saved)).sum())
    return {"bytes": total, "live_bytes": live, "segments": segments, "records": records}
