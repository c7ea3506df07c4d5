"""Test a training process that is killed before its first checkpoint is whole."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from scarctl.arena.folder import arena_folder
from scarctl.daemon.client import ask
from scarctl.daemon.protocol import SOCKET
from scarctl.errors import Unavailable
from scarctl.store import Store
from tests.support import stepper
from tests.support.stored import stored_steps

pytestmark = pytest.mark.usefixtures("both_savers")


def kill_daemon(base: Path) -> None:
    """Send SIGKILL to the host's daemon, if there is one."""
    folder = arena_folder(str(base), "x").parent
    try:
        pid = ask(folder, "status")["pid"]
    except Unavailable:
        return
    os.kill(pid, signal.SIGKILL)
    (folder / SOCKET).unlink(missing_ok=True)


@pytest.mark.leaves_arena
@pytest.mark.parametrize("forget", ["extras", "arena", "nothing"])
def test_death_before_the_first_whole_checkpoint(tmp_path: Path, arena_dir: Path, forget: str) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)
            model, optimizer = stepper.build()
            session = stepper.attach(model, optimizer, str(tmp_path / "store"))
            session._saver.notify = lambda: None  # type: ignore[method-assign]
            optimizer.step()
            session._saving.finish()
            kill_daemon(arena_dir)  # it would at once make durable what this process leaves
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    folder = arena_folder(str(arena_dir), Store.open(str(tmp_path / "store")).run_id)
    lost = {"extras": ("extras-*",), "arena": ("*",)}
    for pattern in lost.get(forget, ()):
        paths = list(folder.glob(pattern))
        assert paths
        for path in paths:
            path.unlink()
    model, optimizer = stepper.build()
    session = stepper.attach(model, optimizer, str(tmp_path / "store"))
    resumed = session.resume()
    assert resumed.step == (1 if forget == "nothing" else 0)
    assert resumed.consistent
    for _ in range(5):
        optimizer.step()
    session.close()
    assert session.stats.errors == 0
    assert set(stored_steps(tmp_path / "store")) == {resumed.step + 5}
