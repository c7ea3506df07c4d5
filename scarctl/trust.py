"""Whether a settings file is the user's own: one that others may write decides where a run saves, and what goes."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

_GROUP, _OTHERS = 0o020, 0o002


def why_untrusted(path: Path, opened: os.stat_result) -> str | None:
    """Why somebody else may have written the file, None if nobody can have.

    opened: status of the file that was opened by this path.

    The file, the link that leads to it and its folder must be this user's or root's. A folder such as /tmp, where
    others may make files and not replace this one, is none that others may write.
    """
    folder = path.absolute().parent
    link = path.lstat()
    if not _owned(opened) or not _owned(link):
        return f"it belongs to user {opened.st_uid if not _owned(opened) else link.st_uid}"
    if who := _writers(opened):
        return f"{who} may write it"
    status = folder.stat()
    if status.st_mode & stat.S_ISVTX:
        return None
    if not _owned(status):
        return f"its folder belongs to user {status.st_uid}"
    if who := _writers(status):
        return f"{who} may write its folder"
    return None


def _owned(status: os.stat_result) -> bool:
    return status.st_uid in (os.geteuid(), 0)


def _writers(status: os.stat_result) -> str | None:
    if status.st_mode & _OTHERS:
        return "everybody"
    if status.st_mode & _GROUP and not _private(status.st_gid):
        return f"group {status.st_gid}"
    return None


def _private(gid: int) -> bool:
    """Whether a group is this user's alone, as many systems give everybody one."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
