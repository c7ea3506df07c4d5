"""Find out whether a folder is on a disk of this machine, which no other machine can have mounted."""

from __future__ import annotations

import os
import re
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_OF_ONE_MACHINE = frozenset(
    ["bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"]
)
"""Types of file systems that one machine mounts at a time. Those not named here may be shared: NFS, Lustre, FUSE."""
_ESCAPED = re.compile(r"\\([0-7]{3})")


def disk_type(path: str | os.PathLike[str]) -> str:
    """Return the type of the file system at an existing path, such as "ext4", if only this machine can have it mounted.

    Return "" if other machines may have it, or if that is unknown.
    """
    try:
        mounts = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    place, found, length = os.path.realpath(path), "", -1
    for line in mounts:
        fields, _, kind = line.partition(" - ")
        point = _ESCAPED.sub(lambda code: chr(int(code[1], 8)), fields.split(" ")[4])
        # The last of several mounts at one point hides the others.
        if len(point) >= length and os.path.commonpath([point, place]) == point:
            found, length = kind.split(" ")[0], len(point)
    return found if found in _OF_ONE_MACHINE else ""
