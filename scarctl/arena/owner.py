"""Note the owner of a replica, an arena whose run lives on another host, in a small file in the arena's folder.

A process that takes the arena for a run on this host deletes the file, under the folder's lock. So the daemon that
writes the replica notices that the arena is no longer a replica.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from scarctl.arena.folder import folder_error, no_links, private
from scarctl.arena.header import OWNER
from scarctl.util.text import printable

_MOST = 4096


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of the arena whose replica a folder has."""

    host: str
    """Name of the owner's host, for display."""
    start: str
    """Name of its training process's start: see `Together`."""
    base_epoch: int
    """First epoch of its training process. With `start`, moments mean the same copies as in the owner's arena."""


def read_owner(folder: Path) -> Owner | None:
    """Return the owner of the replica in `folder`; None if the folder has no replica, or its file is damaged."""
    try:
        with open(folder / OWNER, "rb", opener=no_links) as file:
            fields = json.loads(file.read(_MOST))
        owner = Owner(**fields)
        good = isinstance(owner.host, str) and isinstance(owner.start, str) and type(owner.base_epoch) is int
        return Owner(printable(owner.host), owner.start, owner.base_epoch) if good else None
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def write_owner(folder: Path, owner: Owner) -> None:
    """Note the owner. Raises Unavailable, AccessDenied."""
    try:
        with open(folder / OWNER, "xb", opener=private) as file:
            file.write(json.dumps(asdict(owner)).encode())
    except OSError as error:
        raise folder_error(error, folder / OWNER) from error


def disown(folder: Path) -> None:
    """Have an arena belong to this host from now on. The caller holds the folder's lock."""
    (folder / OWNER).unlink(missing_ok=True)
