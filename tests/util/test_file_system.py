"""Test which file systems count as disks of one machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from scarctl.util import file_system
from scarctl.util.file_system import disk_type

LINES = r"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:27 / /dev/shm rw - tmpfs tmpfs rw
31 22 0:40 /export /data rw - nfs4 server:/export rw
32 31 254:1 / /data/fast rw - xfs /dev/vdb rw
33 22 0:41 / /with\040space rw - fuse.sshfs host: rw
34 22 0:42 / /twice rw - ext4 /dev/vdc rw
35 34 0:43 / /twice rw - lustre server:/fs rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/run", "ext4"),
        ("/dev/shm/run", "tmpfs"),
        ("/data/run", ""),
        ("/data/fast/run", "xfs"),
        ("/data/faster", ""),
        ("/with space/run", ""),
        ("/twice/run", ""),
    ],
)
def test_the_mount_that_has_the_path_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, kind: str
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(LINES)
    monkeypatch.setattr(file_system, "_MOUNTS", mounts)
    assert disk_type(path) == kind


def test_what_this_machine_exports_is_not_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exports = tmp_path / "exports"
    exports.write_text(
        "# Version 1.1\n# Path Client(Flags)\n/with\\040space 10.0.0.0/8(rw)\n/data/fast\t*(rw)\n"
    )
    mounts = tmp_path / "mounts"
    mounts.write_text("22 1 254:0 / / rw - ext4 /dev/vda rw\n")
    monkeypatch.setattr(file_system, "_MOUNTS", mounts)
    monkeypatch.setattr(file_system, "_EXPORTS", (tmp_path / "none", exports))
    assert disk_type("/with space/run") == disk_type("/data/fast") == ""
    assert disk_type("/data/faster") == disk_type("/data") == "ext4"


def test_links_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("22 1 254:0 / / rw - ext4 /dev/vda rw\n31 22 0:40 / /data rw - nfs4 server:/ rw\n")
    monkeypatch.setattr(file_system, "_MOUNTS", mounts)
    (tmp_path / "link").symlink_to("/data")
    assert disk_type(tmp_path) == "ext4"
    assert disk_type(tmp_path / "link" / "run") == ""


def test_it_is_what_the_system_says(tmp_path: Path) -> None:
    if not Path("/proc/self/mountinfo").exists():
        assert disk_type(tmp_path) == ""
        return
    said = subprocess.run(
        ["stat", "--file-system", "--format=%T", tmp_path], check=True, capture_output=True, text=True
    ).stdout.strip()
    name = {"ext2/ext3": "ext4", "overlayfs": "overlay"}.get(said, said)
    assert disk_type(tmp_path) == (name if name in file_system._OF_ONE_MACHINE else "")


def test_without_proc_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_system, "_MOUNTS", tmp_path / "none")
    assert disk_type(os.fspath(tmp_path)) == ""
