"""Check that only the user can write a settings file: it decides where a run saves and which copies are deleted."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

_GROUP, _OTHERS = 0o020, 0o002


def why_untrusted(path: Path, opened: os.stat_result) -> str | None:
    """Return why another user may have written the file, or None.

    opened: status of the file that was opened by this path.

    The file, the link that leads to it and its folder must belong to this user or root. A folder such as /tmp, where
    others can create files but not replace this one, counts as safe.
    """
    folder = path.absolute().parent
    link = path.lstat()
    if not _owned(opened) or not _owned(link):
        return f"it belongs to user {opened.st_uid if not _owned(opened) else link.st_uid}"
    if who := _writers(opened):
        return f"{who} may write to it"
    status = folder.stat()
    if status.st_mode & stat.S_ISVTX:
        return None
    if not _owned(status):
        return f"its folder belongs to user {status.st_uid}"
    if who := _writers(status):
        return f"{who} may write to its folder"
    return None


def _owned(status: os.stat_result) -> bool:
    return status.st_uid in (os.geteuid(), 0)


def _writers(status: os.stat_result) -> str | None:
    if status.st_mode & _OTHERS:
        return "every user"
    if status.st_mode & _GROUP and not _private(status.st_gid):
        return f"group {status.st_gid}"
    return None


def _private(gid: int) -> bool:
    """Return whether this user is the group's only member, as in the private groups of many systems."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
