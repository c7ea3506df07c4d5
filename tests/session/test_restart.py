"""Test a session that continues after its own death and the daemon's: from the right step, with that step's values."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from scarctl.arena import extras
from scarctl.arena.folder import arena_folder
from scarctl.daemon.client import ask
from scarctl.daemon.protocol import SOCKET
from scarctl.errors import Corruption, NoIntactCopy, Unavailable, UsageError
from scarctl.store import Store
from tests.support import stepper
from tests.support.elsewhere import elsewhere
from tests.support.process import Forked, Tell
from tests.support.stored import stored_steps
from tests.support.training import Loop, differing, drained

pytestmark = pytest.mark.usefixtures("warm_torch")


def dies(loop: Loop, tmp_path: Path) -> None:
    """Write the values for the test, then end as by kill -9."""
    torch.save(loop.state(), tmp_path / "state.pt")
    os.kill(os.getpid(), signal.SIGKILL)


def left_by(child: Forked, tmp_path: Path) -> dict[str, torch.Tensor]:
    """Return the values that the process had when it died."""
    assert child.wait() == -signal.SIGKILL
    state: dict[str, torch.Tensor] = torch.load(tmp_path / "state.pt")
    return state


# -- what a dead process left ------------------------------------------------------------------------------------


@contextmanager
def within_extras(happens: Any) -> Iterator[None]:
    """Call `happens()` when the first bytes of extras in memory are written."""
    private = extras.private

    def opened(path: str, flags: int) -> int:
        file = private(path, flags)
        os.write(file, bytes(9))
        happens()
        return file

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extras, "private", opened)
        yield


def no_room() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("happens", [no_room, killed])
def test_a_new_start_that_fails_half_way_loses_nothing(tmp_path: Path, happens: Any) -> None:
    """What a flush has brought into memory waits; the next process takes memory over, and dies at its first step."""

    def body(tell: Tell) -> None:
        loop = Loop(tmp_path / "store", interval=1)
        loop.train(3, settle=True)
        loop.session._saver.stop()  # the store can no longer be reached
        loop.train(3)
        assert loop.session.flush()
        dies(loop, tmp_path)

    def begins(tell: Tell) -> None:
        loop = Loop(tmp_path / "store")
        assert loop.session.resume().step == 6
        with within_extras(happens):
            assert not loop.session.flush()
            os._exit(3)

    with Forked(body) as child:
        expected = left_by(child, tmp_path)
    with Forked(begins) as child:
        assert child.wait() == (3 if happens is no_room else -signal.SIGKILL)
    again = Loop(tmp_path / "store", seed=99)
    resumed = again.session.resume()
    assert (resumed.step, resumed.consistent) == (6, True)
    assert again.position == {"batches": 6}
    assert differing(again.state(), expected) == []
    drained([again.session])
    resumed, state = elsewhere(tmp_path / "store", "rollback")
    assert (resumed.step, resumed.consistent) == (6, True), "it became durable as one sealed state"
    assert differing(state, expected) == []
    again.session.close()


# -- resume() fails ----------------------------------------------------------------------------------------------


def saved(tmp_path: Path) -> dict[str, torch.Tensor]:
    """Return the values in a store with a sealed state of step 3."""
    loop = Loop(tmp_path / "store")
    loop.train(3)
    loop.session.close()
    return loop.state()


def test_a_resume_that_found_no_copy_can_be_tried_again(tmp_path: Path, both_savers: str) -> None:
    expected = saved(tmp_path)
    segments = list((tmp_path / "store").rglob("seg/*"))
    for segment in segments:
        segment.rename(tmp_path / segment.name)  # the disk is not mounted
    loop = Loop(tmp_path / "store", seed=99)
    for _ in range(2):
        before = loop.state()
        with pytest.raises((NoIntactCopy, Corruption)):
            loop.session.resume()
        assert differing(loop.state(), before) == []
        with pytest.raises(UsageError, match=r"call session.resume\(\)"):
            loop.train(1)
        assert torch.equal(loop.model.embed.weight, before["embed.weight"])
    for segment in segments:
        (tmp_path / segment.name).rename(segment)
    resumed = loop.session.resume()
    assert (resumed.step, resumed.consistent) == (3, True)
    assert differing(loop.state(), expected) == []
    loop.position["batches"] = 3
    loop.train(2)
    expected = loop.state()
    loop.session.close()
    resumed, state = elsewhere(tmp_path / "store")
    assert (resumed.step, resumed.consistent) == (5, True)
    assert differing(state, expected) == []


def test_what_fails_right_after_a_resume_saves_no_later_extras(tmp_path: Path) -> None:
    first = Loop(tmp_path / "store", daemon=False)
    first.train(4)
    first.session.close()
    second = Loop(tmp_path / "store", seed=99, daemon=False)

    def interrupted() -> None:
        with second.session:
            second.session.resume()
            second.position["batches"] += 1  # the next batch is drawn, and its step never ends
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    third = Loop(tmp_path / "store", daemon=False)
    resumed = third.session.resume()
    assert (resumed.step, resumed.consistent) == (4, True)
    assert third.position == {"batches": 4}
    third.session.close()


# -- killed before the first checkpoint is whole ------------------------------------------------------------------


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
@pytest.mark.usefixtures("both_savers")
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
