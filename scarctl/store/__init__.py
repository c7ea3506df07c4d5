"""Keep saved state: segments, terms, records, and the protocol that commits them. Format: docs/FORMAT.md."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scarctl.store.check import verify
    from scarctl.store.gc import Collector
    from scarctl.store.shard_state import ShardState
    from scarctl.store.snapshot import (
        SealedSet,
        Snapshot,
        create_snapshot,
        delete_snapshot,
        read_snapshot,
        sealed_sets,
        snapshots,
    )
    from scarctl.store.store import Store
    from scarctl.store.topology import (
        Topology,
        complete_sets,
        create_topology,
        newest_topology,
        topology_epochs,
    )
    from scarctl.store.writer import StoreWriter, open_writer

__all__ = [
    "Collector",
    "SealedSet",
    "ShardState",
    "Snapshot",
    "Store",
    "StoreWriter",
    "Topology",
    "complete_sets",
    "create_snapshot",
    "create_topology",
    "delete_snapshot",
    "newest_topology",
    "open_writer",
    "read_snapshot",
    "sealed_sets",
    "snapshots",
    "topology_epochs",
    "verify",
]

_MODULES = {
    "check": ("verify",),
    "gc": ("Collector",),
    "shard_state": ("ShardState",),
    "snapshot": (
        "SealedSet",
        "Snapshot",
        "create_snapshot",
        "delete_snapshot",
        "read_snapshot",
        "sealed_sets",
        "snapshots",
    ),
    "store": ("Store",),
    "topology": ("Topology", "complete_sets", "create_topology", "newest_topology", "topology_epochs"),
    "writer": ("StoreWriter", "open_writer"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a name's module when it is first used: a training process needs few of them."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return found
