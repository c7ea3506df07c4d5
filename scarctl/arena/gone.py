"""Tell whether the store of a dead run is gone for good, or cannot be reached at present.

A store that cannot be opened usually comes back: its disk is not mounted, its network is down, a permission is missing.
So it counts as gone only with proof, otherwise it is taken for one that is away:

- Another store is in its folder: one with another id.
- Its folder does not exist, or is empty. The nearest folder above that exists is the one that was there when the run
  was opened, by device and inode. And that folder is on the device that the store was on.

Where a file system is not mounted, the folder below its mount is another one. Where the mount's own folder was removed,
too, the store was on another device.

A store that was moved looks like one that was deleted. So memory is not removed before a day has passed. Remote stores
cannot be told apart from ones that are away.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path

from scarctl.arena.folder import mark, no_links
from scarctl.arena.header import SITE
from scarctl.errors import NoStore, ScarError
from scarctl.store import Store

log = logging.getLogger("scarctl")

REPLACED = "another store was made in its place"
DELETED = "it was deleted or moved"
_MOST = 1 << 16


def why_gone(folder: Path, place: str) -> str | None:
    """Return why the store of the arena in `folder` is gone, as words; None unless that is certain.

    place: the address of the store, as the arena has it. Waits as long as the file system does.
    """
    store_id = folder.name[:32]
    site = _read_site(folder)
    if site is None:
        return None
    path, marks = site
    with contextlib.suppress(ScarError, OSError):
        if Store.open(place).id == store_id:
            return None  # it was moved, and a link put in its place
    if _other_store(path, store_id):
        return REPLACED
    try:
        return DELETED if _was_deleted(path, marks) else None
    except OSError as error:
        log.debug("%s cannot be looked for: %s", path, error)
        return None


def _other_store(place: str, store_id: str) -> bool:
    try:
        return Store.open(place).id != store_id
    except (ScarError, OSError):
        return False


def _was_deleted(place: str, marks: list[list[int]]) -> bool:
    levels = [Path(place), *Path(place).parents]
    if len(levels) != len(marks):
        return False
    at = next(n for n, path in enumerate(levels) if _exists(path))
    # Of the same device as the store: no file system was mounted between the two.
    if mark(levels[at]) != marks[at] or marks[at][0] != marks[0][0]:
        return False
    if at:
        return True
    try:
        Store.open(place)
    except NoStore as error:
        return error.kind == "no-store"  # an empty folder
    except ScarError:
        return False
    return False


def _exists(path: Path) -> bool:
    """Return whether there is something, if only a broken link. Raises OSError if that is not known."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def _read_site(folder: Path) -> tuple[str, list[list[int]]] | None:
    """Return the real path of the store's folder, and the marks of it and of all folders above; None if unknown."""
    try:
        with open(folder / SITE, encoding="utf-8", opener=no_links) as file:
            noted = json.loads(file.read(_MOST))
    except (OSError, ValueError, RecursionError):
        return None
    path, marks = (noted.get("path"), noted.get("marks")) if isinstance(noted, dict) else (None, None)
    if not (isinstance(path, str) and os.path.isabs(path) and isinstance(marks, list)):
        return None
    good = all(isinstance(m, list) and len(m) == 2 and all(type(n) is int for n in m) for m in marks)
    return (path, marks) if good else None
