"""Refuse a place that holds no store, or one whose settings cannot be read, and say what it holds."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from scarctl.errors import Corruption, NoStore, ScarError
from scarctl.store.backends.address import Address
from scarctl.store.backends.base import Blobs
from scarctl.store.backends.probe import is_left_over
from scarctl.store.format import LANES, LOCK, MAX_SETTINGS, SETTINGS, corrupt, load_json

STORE_FOLDERS = frozenset(("layout", LANES))
"""Folders that every store has after its first commit."""
_ABOVE, _MOST, _LISTED = 4, 1000, 3
"""Folders above a path, and entries of a folder, in which a hint looks for stores; stores that it lists."""
SETTINGS_COPY = "layout/settings.json"
"""The same bytes as `scarctl.json`, in a folder: `rm *` in the store's own folder does not delete it."""


def keep_copy(blobs: Blobs) -> None:
    """Write the copy of the settings, unless the store has it. The folder `layout` exists."""
    # If the settings are gone, the next opening reports it.
    with contextlib.suppress(FileExistsError, FileNotFoundError):
        blobs.create_exclusive(SETTINGS_COPY, [blobs.read(SETTINGS, MAX_SETTINGS)])


def check_copy(blobs: Blobs) -> None:
    """Raise Corruption if the store's copy of the settings is not a copy of them."""
    copy = blobs.read(SETTINGS_COPY, MAX_SETTINGS)
    if copy == blobs.read(SETTINGS, MAX_SETTINGS):
        return
    what = blobs.where(SETTINGS_COPY)
    try:
        load_json(copy, what)
    except Corruption as error:
        raise corrupt(
            what, "it is damaged: delete it, and the next start of the run writes it again"
        ) from error
    raise corrupt(
        what,
        f"it is intact, but differs from {SETTINGS}: if that file was copied here from another store, put this one "
        "back in its place; otherwise delete this one",
    )


def _put_back(address: Address, blobs: Blobs) -> str:
    """Return what to do without `scarctl.json`: the command, if the store has an intact copy of it."""
    with contextlib.suppress(
        ScarError, FileNotFoundError
    ):  # the caller raises what is wrong with the settings
        load_json(blobs.read(SETTINGS_COPY, MAX_SETTINGS), blobs.where(SETTINGS_COPY))
        copy, lost = blobs.where(SETTINGS_COPY), blobs.where(SETTINGS)
        if address.root is not None:
            return (
                f"put that file back: `cp {shlex.quote(copy)} {shlex.quote(lost)}`. Nothing else is missing"
            )
        return f"put that file back: copy {copy} to {lost}. Nothing else is missing"
    return (
        "put that file back from a copy of this store, however old: it never changes. Nothing else is missing "
        "because of it. Without a copy, the tensors are in lanes/*/seg, as safetensors"
    )


def near(path: Path) -> str:
    """Return the end of a hint, which names stores around, in or next to a local path without one; "" without any."""
    with contextlib.suppress(OSError):  # a hint about what can be read
        for above in path.parents[:_ABOVE]:
            if (above / SETTINGS).is_file():
                return f"; did you mean the store {above}?"
        if path.is_file():
            return ""
        folder = path if path.is_dir() else path.parent
        with os.scandir(folder) as entries:
            names = [
                entry.name for entry in islice(entries, _MOST) if os.path.isfile(f"{entry.path}/{SETTINGS}")
            ]
        close = [] if folder == path else get_close_matches(path.name, names, 1, 0.8)
        if close:
            return f"; did you mean {folder / close[0]}?"
        if names:
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            return f"; stores in {folder}: {', '.join(sorted(names)[:_LISTED])}{more}"
    return ""


def no_store(address: Address) -> str:
    """Return the hint for a place without a store."""
    known = "check the path; `scarctl status` shows the stores that this host knows"
    return known if address.root is None else f"{known}{near(address.root)}"


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
            hint=_put_back(address, blobs),
            kind="store-without-settings",
        )
    raise NoStore(
        f"{place}: this folder holds other files ({sorted(others)[0]!r}), but no store",
        hint=hint if address.root is None else f"{hint}{near(address.root)}",
        kind="foreign-store",
    )


@contextlib.contextmanager
def damaged_settings(address: Address, blobs: Blobs) -> Iterator[None]:
    """Raise Corruption (kind "damaged-settings") with the right advice: no command opens a store without settings."""
    try:
        yield
    except Corruption as error:
        if error.kind == "newer-format":
            raise
        raise Corruption(error.message, hint=_put_back(address, blobs), kind="damaged-settings") from error
