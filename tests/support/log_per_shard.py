"""Create stores as earlier versions did: each shard of a process has a log of its own."""

from __future__ import annotations

import os
from typing import Any

from scarctl.store import Store
from scarctl.store.format import FORMAT, MAX_SETTINGS, SETTINGS, dump_json, load_json


def store_with_a_log_per_shard(url: str | os.PathLike[str], **options: Any) -> Store:
    """Create such a store. options: of `Store.create`."""
    store = Store.create(url, **options)
    if store.one_log:
        obj = load_json(store.blobs.read(SETTINGS, MAX_SETTINGS), SETTINGS)
        del obj["one_log"]
        store.blobs.delete(SETTINGS)
        store.blobs.create_exclusive(SETTINGS, [dump_json({**obj, "format": FORMAT})])
    return store.again()
