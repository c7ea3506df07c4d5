"""Test a store's folder that is copied to another machine, to the same path, and trains there, too, with one secret."""

from __future__ import annotations

import ctypes
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.copied_member import INTERVAL, Hosts, hosts
from tests.support.forkserver import Program
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.leaves_arena, pytest.mark.timeout(300)]
BOOT = "/proc/sys/kernel/random/boot_id"
ENTER = """
import ctypes, os, runpy, subprocess, sys
mounts, sys.argv[:] = sys.argv[1:5], sys.argv[5:]
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x20000):  # CLONE_NEWNS
    raise OSError(ctypes.get_errno(), "unshare")
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
for there, at in (mounts[:2], mounts[2:]):
    subprocess.run(["mount", "--bind", there, at], check=True)
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


class Machine(Hosts):
    """Hosts on another machine: another boot id, and another folder at the store's path."""

    def __init__(self, folder: Path, store: Path, copied: Path) -> None:
        folder.mkdir()
        super().__init__(folder, store)
        self.secret.write_text((store.parent / "secret").read_text())
        self._copied = copied
        self._boot = folder / "boot_id"
        self._boot.write_text(str(uuid.uuid4()))

    def run(self, home: str, words: list[str], errors: Path) -> Program:
        mounts = [str(self._copied), str(self.store), str(self._boot), BOOT]
        with errors.open("ab") as file:
            return Program(
                ["-c", ENTER, *mounts, "tests.support.copied_member", *words], stdout=file, stderr=file
            )


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """Yield this machine's hosts. Skip if this user may not mount."""
    monkeypatch.delenv("SCARCTL_DAEMON")
    if os.geteuid() or not Path(BOOT).exists():
        pytest.skip("only root may mount")
    pid = os.fork()
    if not pid:
        os._exit(int(ctypes.CDLL(None).unshare(0x20000) != 0))
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        pytest.skip("this user may not make mount namespaces")
    with hosts(tmp_path, tmp_path / "store") as made:
        yield made


def test_a_copy_on_another_machine_meets_none_of_the_original_s_hosts(here: Hosts) -> None:
    two = here.both()
    two.copy(0)
    copied = here.folder / "copied"
    shutil.copytree(here.store, copied, ignore=shutil.ignore_patterns(".tmp-*"))
    there = Machine(here.folder / "there", Path(here.store), copied)
    try:
        found = there.start(0, "north")
        assert found["tiers"].keys() == {"store"}, found
        text = "hosts of other machines are not met"
        wait_until(lambda: any(text in line for line in there.warned(0)), 120)
        # It tries the hosts of the records that it has, and none accepts it.
        met = ("up to date", "behind", "full", "following")
        assert not [line for line in there.run_of(0, "north")["peers"] if line.endswith(met)]
        # The original's hosts know nothing of it, and continue.
        two.until_head(0, "east", 3 * INTERVAL)
        two.until_copied(0, "east")
        assert not [line for line in two.warned(0) if not line.startswith("step ")]  # a slow store
        two.order(0, "stop store")
        head = two.copy(0, stopped=True)
        two.lose("east", 0)
        found = two.start(0, "south")
        assert (found["step"], found["consistent"], found["tiers"].keys()) == (head, True, {"peer"}), found
        assert there.end(0) == two.end(1) == two.end(0) == 0
    finally:
        there.close()
