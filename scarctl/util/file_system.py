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
_EXPORTS = (Path("/proc/fs/nfsd/exports"), Path("/var/lib/nfs/etab"))
"""Lists of the folders that this machine exports over NFS, each line with a path first."""
_ESCAPED = re.compile(r"\\([0-7]{3})")


def disk_type(path: str | os.PathLike[str]) -> str:
    """Return the type of the file system at an existing path, such as "ext4", if only this machine can have it mounted.

    Return "" if other machines may have it, as if this one exports it over NFS, or if that is unknown.
    """
    place, found, length = os.path.realpath(path), "", -1
    for line in _lines(_MOUNTS):
        fields, _, kind = line.partition(" - ")
        point = _unescaped(fields.split(" ")[4])
        # The last of several mounts at one point hides the others.
        if len(point) >= length and _is_within(place, point):
            found, length = kind.split(" ")[0], len(point)
    exported = any(_is_within(place, _unescaped(line.split()[0])) for at in _EXPORTS for line in _lines(at))
    return found if found in _OF_ONE_MACHINE and not exported else ""


def _lines(path: Path) -> list[str]:
    """Return the lines of a list of paths; [] if this system has none."""
    try:
        return [
            line for line in path.read_text(errors="surrogateescape").splitlines() if line and line[0] != "#"
        ]
    except OSError:
        return []


def _is_within(path: str, folder: str) -> bool:
    return os.path.commonpath([folder, path]) == folder


def _unescaped(path: str) -> str:
    return _ESCAPED.sub(lambda code: chr(int(code[1], 8)), path)
