"""Refuse a place that holds no store, and name its content."""

from __future__ import annotations

from scarctl.errors import Corruption, NoStore
from scarctl.store.backends.address import Address
from scarctl.store.backends.base import Blobs
from scarctl.store.backends.probe import is_left_over
from scarctl.store.format import LOCK, SETTINGS

_STORES = frozenset(("layout", "shards"))
"""Folders that every store has after its first commit."""


def refuse_foreign(address: Address, blobs: Blobs, hint: str) -> None:
    """Raise NoStore if the place is not an empty folder. Files that a crash left do not count.

    Raises Corruption (kind "store-without-settings") if it is a store, except for its `scarctl.json`.
    """
    others = [name for name in blobs.top() if name != LOCK and not is_left_over(name)]
    if not others or SETTINGS in others or blobs.has(SETTINGS):
        return  # another process may create the store meanwhile
    place = address.root or address.shown
    if set(others) >= _STORES:
        raise Corruption(
            f"{place}: this is a store without its {SETTINGS}",
            hint="put that file back from a copy of this store; nothing else is missing because of it",
            kind="store-without-settings",
        )
    raise NoStore(
        f"{place}: this folder holds other files ({sorted(others)[0]!r}), but no store",
        hint=hint,
        kind="foreign-store",
    )
