"""Test that removing arenas of dead runs loses nothing."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from scarctl.arena import stale
from scarctl.arena.arena import Arena
from scarctl.arena.folder import arena_folder, host_folder, lock_folder
from scarctl.arena.kinship import ASIDE
from scarctl.arena.owner import Owner, write_owner
from scarctl.arena.stale import DAY, has_unsaved, reap, survey
from scarctl.daemon import client
from scarctl.daemon.server import Daemon
from scarctl.errors import Contention
from scarctl.state.version import pack
from tests.daemon.rig import acknowledge, copy_into, small_layout
from tests.daemon.trainer import stop
from tests.support.waiting import wait_until

ID = "0123456789abcdef" * 2
NO_PROCESS = 0x7FFFFFF0


def left(base: Path, store_id: str = ID, *, pending: int = 0, queued: bool = False, age: float = 0.0) -> Path:
    """Create the arena of a dead run; return its folder."""
    layout = small_layout()
    folder = arena_folder(str(base), store_id)
    arena = Arena.create(folder, layout, run_id=store_id, epoch=1)
    everything = np.arange(layout.partitions)
    assert copy_into(arena, everything, pack(1, 7), 7, whole="ab" * 16, extras={})
    acknowledge(arena, everything[pending:])
    arena.reach(9)
    arena.take_over(NO_PROCESS)
    if not queued:
        arena.keep(arena.slot.moment)
    arena.close()
    if age:
        then = time.time() - age
        os.utime(folder, (then, then))
    return folder


def test_what_a_dead_run_left_is_found_and_removed(arena_dir: Path) -> None:
    folder = left(arena_dir)
    (found,) = survey(folder.parent)
    assert (found.id, found.folder, found.pid) == (ID, str(folder), NO_PROCESS)
    assert (found.head_step, found.durable_step, found.pending_partitions) == (9, 7, 0)
    assert found.bytes == (folder / "arena").stat().st_size
    assert found.durable
    assert [arena.id for arena in reap(folder.parent)] == [ID]
    assert not folder.exists()
    assert survey(folder.parent) == []
    assert reap(folder.parent) == []


@pytest.mark.leaves_arena
@pytest.mark.parametrize("waits", [{"pending": 1}, {"queued": True}])
def test_what_the_store_has_not_stays(arena_dir: Path, waits: dict[str, int]) -> None:
    folder = left(arena_dir, **waits)  # type: ignore[arg-type]
    (found,) = survey(folder.parent)
    assert not found.durable
    assert reap(folder.parent) == []
    assert (folder / "arena").exists()


def test_what_a_live_process_has_stays(arena_dir: Path) -> None:
    folder = left(arena_dir)
    arena = Arena.open_existing(folder, run_id=ID)
    assert arena is not None
    assert reap(folder.parent) == [], "its lock says that it is alive, whatever number it has"
    arena.take_over()
    assert survey(folder.parent) == []
    arena.remove()


def test_a_process_number_that_somebody_else_has_by_now(arena_dir: Path) -> None:
    folder = left(arena_dir)
    arena = Arena.open_existing(folder, run_id=ID)
    assert arena is not None
    arena.take_over()
    arena.close()
    assert survey(folder.parent) == []
    assert len(reap(folder.parent)) == 1, "nobody holds its lock: its run is dead"


def test_a_run_that_the_daemon_finishes_is_not_stale(arena_dir: Path) -> None:
    folder = left(arena_dir, pending=2)
    assert survey(folder.parent, frozenset({ID})) == []
    shutil.rmtree(folder)


def test_only_what_has_been_quiet_for_long_enough(arena_dir: Path) -> None:
    old, young = left(arena_dir, "a" * 32, age=2 * DAY), left(arena_dir, "b" * 32, age=DAY / 2)
    assert [Path(arena.folder) for arena in reap(old.parent, older_than=DAY)] == [old]
    assert young.exists()
    assert reap(young.parent)


def test_a_clock_that_was_set_after_the_boot_makes_nothing_old(
    arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine often boots with a wrong date. A replica of a minute ago is no memory of years ago."""
    replica = left(arena_dir, pending=2, age=900 * DAY)
    write_owner(replica, Owner("b", "11" * 16, 1))
    past = time.time() - 900 * DAY
    os.utime(replica, (past, past))
    monkeypatch.setattr(stale, "_uptime", lambda: DAY / 2)
    assert reap(replica.parent, older_than=DAY) == []
    monkeypatch.setattr(stale, "_uptime", lambda: 2 * DAY)
    assert reap(replica.parent, older_than=DAY, live=frozenset({ID})) == [], "its owner sends to it now"
    assert len(reap(replica.parent, older_than=DAY)) == 1
    assert not replica.exists()


@pytest.mark.leaves_arena
def test_what_is_not_an_arena_is_shown_and_left_alone(
    arena_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = left(arena_dir)
    (folder / "arena").write_bytes(b"something else")
    foreign = folder.parent / "notes"
    foreign.mkdir()
    (foreign / "arena").touch()
    (found,) = survey(folder.parent)
    assert (found.pending_partitions, found.durable) == (None, False)
    assert reap(folder.parent) == []
    assert (foreign / "arena").exists()
    assert "not an arena" in caplog.text


@pytest.mark.leaves_arena
def test_memory_that_another_host_may_come_for(arena_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = f"{ID}.{'cd' * 8}-3"
    folder = left(arena_dir, run, pending=2)
    for runs, found in (((ID,), True), (("ff" * 16, run[:49]), True), (("ff" * 16,), False), ((), False)):
        assert has_unsaved(folder.parent, runs) is found
    os.utime(folder, (then := time.time() - DAY - 1, then))
    monkeypatch.setattr(stale, "_uptime", lambda: DAY / 2)
    assert has_unsaved(folder.parent, (ID,)), "the clock was set since"
    monkeypatch.setattr(stale, "_uptime", lambda: 2 * DAY)
    assert not has_unsaved(folder.parent, (ID,)), "a day later"
    folder.rename(folder.with_name(run + ASIDE))
    os.utime(folder.with_name(run + ASIDE))
    assert not has_unsaved(folder.parent, (ID,)), "set aside"
    left(arena_dir, f"{run}1")
    assert not has_unsaved(folder.parent, (ID,)), "the store has everything"
    left(arena_dir, f"{run}2", queued=True)
    assert has_unsaved(folder.parent, (ID,)), "the store lacks its extras"


def test_what_was_set_aside_stays(arena_dir: Path) -> None:
    folder = left(arena_dir)
    (folder / "anything").touch()
    assert len(reap(folder.parent)) == 1
    assert [path.name for path in folder.iterdir()] == ["anything"]
    (folder / "anything").unlink()


def test_nothing_there_or_not_ours(arena_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = host_folder(str(arena_dir))
    assert survey(folder) == []
    assert reap(folder) == []
    folder.mkdir(mode=0o755)
    assert reap(folder) == []
    assert "0700" in caplog.text


def test_a_session_waits_while_its_arena_is_looked_at(
    arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that holds the lock for a moment is not a live process of that arena."""
    folder = left(arena_dir)
    looking = lock_folder(folder)
    letting_go = threading.Timer(0.2, os.close, [looking])
    letting_go.start()
    arena = Arena.open_existing(folder, run_id=ID)
    letting_go.join()
    assert arena is not None
    sleep, slept = time.sleep, []
    monkeypatch.setattr(time, "sleep", lambda seconds: (slept.append(seconds), sleep(seconds)))
    assert reap(folder.parent) == []
    assert not slept, "but who only looks does not wait"
    with pytest.raises(Contention):
        lock_folder(folder)
    assert slept
    arena.remove()


def test_sessions_that_come_while_dead_runs_are_removed(arena_dir: Path) -> None:
    folder = arena_folder(str(arena_dir), ID)
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            reap(folder.parent)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(100):
            left(arena_dir)
            arena = Arena.open_existing(folder, run_id=ID)
            if arena is None:  # it has been removed
                arena = Arena.create(folder, small_layout(), run_id=ID, epoch=1)
            assert (folder / "arena").exists()
            arena.remove()
    finally:
        ended.set()
        looking.join()


def test_a_fault_while_looking_is_logged(
    arena_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = left(arena_dir)

    def broken(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EIO, "no luck")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", broken)
        assert reap(folder.parent) == []
    assert "no luck" in caplog.text
    assert len(reap(folder.parent)) == 1


def test_a_daemon_that_runs_on_tidies_up_now_and_then(
    arena_dir: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr("scarctl.daemon.server._REAP_SECONDS", 0.3)
    request.getfixturevalue("daemon")
    for _ in range(2):
        old = left(arena_dir, age=2 * DAY)
        wait_until(lambda gone=old: not gone.exists())  # type: ignore[misc]


def test_looking_does_not_keep_the_daemon_from_answering(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr("scarctl.daemon.server.reap", lambda *_, **__: go_on.wait(20))
    daemon: Daemon = request.getfixturevalue("daemon")
    wait_until(lambda: any(thread.name == "scarctl-reap" for thread in threading.enumerate()))
    assert client.question(daemon.folder, "status", patience=5.0) is not None
    go_on.set()


@pytest.mark.slow
def test_the_daemon_tidies_up_when_it_starts(arena_dir: Path) -> None:
    old, young = left(arena_dir, "a" * 32, age=2 * DAY), left(arena_dir, "b" * 32)
    subprocess.run([sys.executable, "-m", "scarctl.daemon", str(old.parent)], check=True)
    wait_until(lambda: not old.exists())
    assert young.exists()
    stop(old.parent)
    shutil.rmtree(young)
