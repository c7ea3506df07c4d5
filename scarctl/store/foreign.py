"""Refuse a place that holds no store, or one whose settings cannot be read, and say what it holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from scarctl.errors import Corruption, NoStore
from scarctl.store.backends.address import Address
from scarctl.store.backends.base import Blobs
from scarctl.store.backends.probe import is_left_over
from scarctl.store.format import LOCK, SETTINGS

STORE_FOLDERS = frozenset(("layout", "shards"))
"""Folders that every store has after its first commit."""
_PUT_BACK = (
    "put that file back from a copy of this store, however old: it never changes. Nothing else is missing because of "
    "it. Without a copy, the tensors are in shards/*/seg, as safetensors"
)


def refuse_foreign(address: Address, blobs: Blobs, hint: str) -> None:
    """Raise NoStore if the place is not an empty folder. Files that a crash left do not count.

    Raises Corruption (kind "store-without-settings") if it is a store, except for its `scarctl.json`.
    """
    others = [name for name in blobs.top() if name != LOCK and not is_left_over(name)]
    if not others or SETTINGS in others or blobs.has(SETTINGS):
        return  # another process may create the store meanwhile
    place = address.root or address.shown
    if set(others) >= STORE_FOLDERS:
        raise Corruption(
            f"{place}: this is a store without its {SETTINGS}",
            hint=_PUT_BACK,
            kind="store-without-settings",
        )
    raise NoStore(
        f"{place}: this folder holds other files ({sorted(others)[0]!r}), but no store",
        hint=hint,
        kind="foreign-store",
    )


@contextlib.contextmanager
def damaged_settings() -> Iterator[None]:
    """Raise Corruption (kind "damaged-settings") with the right advice: no command opens a store without settings."""
    try:
        yield
    except Corruption as error:
        if error.kind == "newer-format":
            raise
        raise Corruption(error.message, hint=_PUT_BACK, kind="damaged-settings") from error
