"""Test the persister's thread with a store that fails and processes that die: nothing is lost, order is kept."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scarctl.errors import AccessDenied, Fenced, Unavailable
from scarctl.persist.thread import FIRST_PAUSE, LONGEST_PAUSE, PersisterThread, pause_after
from scarctl.store import open_writer
from scarctl.util.niceness import POLITE
from tests.daemon.rig import Rig
from tests.support.waiting import wait_until

SOME = np.array([0, 3, 4, 11, 18])


@pytest.fixture
def thread(rig: Rig) -> Iterator[PersisterThread]:
    made = PersisterThread(rig.persister)
    yield made
    made.close()


def test_what_is_handed_over_becomes_durable(rig: Rig, thread: PersisterThread) -> None:
    rig.save(rig.everything, 1, sealed=True)
    thread.notify()
    assert thread.drain(10)
    rig.save(SOME, 2)
    thread.notify()
    assert thread.drain(10)
    assert not rig.arena.waits
    assert not rig.arena.pending().any()
    assert set(rig.stored()[1][SOME]) == {2}
    assert thread.stats.requests == 2
    assert thread.stats.nbytes == rig.layout.nbytes + rig.layout.partition_bytes[SOME].sum()
    assert thread.failure is thread.last_error is None


def test_what_waits_already_is_taken_without_a_word(rig: Rig) -> None:
    rig.save(rig.everything, 1, sealed=True)
    thread = PersisterThread(rig.persister)
    wait_until(lambda: not rig.arena.waits)
    thread.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_a_store_that_fails_for_a_while(rig: Rig, thread: PersisterThread, number: int) -> None:
    for operation, calls in (("write", [3, 20]), ("commit", [2]), ("create_exclusive", [1]), ("writer", [4])):
        rig.blobs.fail(operation, number, at=calls)
    for step in range(1, 5):
        rig.save(rig.everything if step == 1 else SOME, step, sealed=step == 1)
        thread.notify()
        assert step > 1 or thread.drain(20)
    assert thread.drain(20)
    assert rig.blobs.raised == 5
    assert rig.arena.failed_saves == thread.stats.errors >= 2
    assert thread.failure is thread.last_error is None
    assert set(rig.stored()[1][SOME]) == {4}
    seen = _steps(rig)
    assert seen.count(1) == 1
    assert seen == sorted(seen)


def _steps(rig: Rig) -> list[int]:
    return [r.step for r in rig.store.log(0).records() if r.commits]


def test_a_store_that_stays_down_keeps_the_queue_and_says_why(rig: Rig, thread: PersisterThread) -> None:
    rig.blobs.break_down("write", errno.ENOSPC)
    rig.save(SOME, 1)
    rig.save(np.array([1, 2]), 2)
    started = time.monotonic()
    assert not thread.drain(0.4)
    assert time.monotonic() - started < 5
    assert rig.arena.waits
    assert isinstance(thread.fault(), Unavailable)
    assert "No space left" in str(thread.fault())
    assert thread.failure is None
    rig.blobs.mend()
    assert thread.drain(20)  # at once: a waiting thread does not sit out the pause
    assert _steps(rig)
    assert set(rig.stored()[0][SOME]) == {1}


def test_pauses_grow_and_are_not_the_same_on_all_hosts() -> None:
    for jitter in (0.0, 0.5, 0.999):
        pauses = [pause_after(failures, jitter) for failures in range(1, 100)]
        assert pauses == sorted(pauses)
        assert FIRST_PAUSE / 2 <= pauses[0] <= FIRST_PAUSE
        assert LONGEST_PAUSE / 2 <= pauses[-1] <= LONGEST_PAUSE


def test_a_refusal_is_not_for_ever(rig: Rig, thread: PersisterThread) -> None:
    rig.blobs.break_down("writer", errno.EROFS)
    rig.save(SOME, 1)
    rig.save(np.array([1, 2]), 2)
    started = time.monotonic()
    assert not thread.drain(30)
    assert time.monotonic() - started < 10  # waiting longer would not help
    assert isinstance(thread.fault(), AccessDenied)
    assert rig.arena.waits
    rig.blobs.mend()  # mounted again
    assert thread.drain(10)
    assert thread.last_error is None
    assert rig.stored()[0][[0, 1]].tolist() == [1, 2]


def test_a_writer_that_is_fenced_halts_and_a_later_thread_goes_on(rig: Rig, thread: PersisterThread) -> None:
    assert thread.drain(30)  # its first look, which may be late, finds nothing
    rig.save(SOME, 1)
    rig.save(np.array([1, 2]), 2)
    other = rig.writer.store.again()
    Path(other.blobs.where("lock")).unlink()  # as if on another host
    open_writer(other, layout=rig.layout).close()
    started = time.monotonic()
    assert not thread.drain(30)
    assert time.monotonic() - started < 10  # waiting longer would not help
    assert isinstance(thread.failure, Fenced)
    assert rig.arena.waits


def test_a_defect_halts_and_is_seen(
    rig: Rig, thread: PersisterThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(*_: Any) -> int:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(rig.persister, "persist", defect)
    rig.save(SOME, 1)
    assert not thread.drain(10)
    assert "ZeroDivisionError" in str(thread.failure)
    assert rig.arena.waits


def test_closing_finishes_what_is_being_written_and_leaves_the_rest(
    rig: Rig, thread: PersisterThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go = threading.Event(), threading.Event()
    persist = rig.persister.persist

    def slow(number: Any) -> int:
        entered.set()
        go.wait(10)
        return persist(number)

    monkeypatch.setattr(rig.persister, "persist", slow)
    rig.save(SOME, 1)
    thread.notify()
    entered.wait(10)
    rig.save(np.array([1, 2]), 2)
    thread.notify()
    threading.Timer(0.05, go.set).start()
    thread.close()
    assert rig.arena.waits
    assert not thread.drain(30)  # it has ended, which is reported at once
    thread.close()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a niceness of their own on Linux only")
def test_training_goes_first(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def persist(number: int) -> int:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        rig.arena.serve(number)
        return 0

    monkeypatch.setattr(rig.persister, "persist", persist)
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    thread = PersisterThread(rig.persister)
    number = rig.save(SOME, 1)
    thread.notify()
    wait_until(lambda: seen)
    thread.close()
    assert number
    assert seen == [min(19, usual + POLITE)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == usual


TRAINER = """
import sys, numpy as np
from pathlib import Path
from scarctl.persist.thread import PersisterThread
from tests.daemon.rig import Rig
rig = Rig(Path(sys.argv[1]), Path(sys.argv[2]))
thread = PersisterThread(rig.persister)
rig.save(rig.everything, 1, sealed=True)
assert thread.drain(30)
print("ready", flush=True)
random, step = np.random.default_rng(int(sys.argv[3])), 1
while True:
    step += 1
    free = np.flatnonzero(~rig.arena.pending())
    if free.size:
        ids = np.sort(random.choice(free, min(6, free.size), replace=False))
        rig.save(ids, step)
        thread.notify()
"""


def test_a_run_that_is_killed_is_finished_by_the_next(tmp_path: Path, arena_dir: Path) -> None:
    for round_ in range(2):
        folder, base = tmp_path / f"store{round_}", arena_dir / str(round_)
        base.mkdir(mode=0o700)
        child = subprocess.Popen(
            [sys.executable, "-c", TRAINER, folder, base, str(round_)],
            stdout=subprocess.PIPE,
            cwd=os.getcwd(),
        )
        assert child.stdout is not None
        with child:
            assert child.stdout.readline()
            time.sleep(0.05 + 0.1 * round_)
            child.send_signal(signal.SIGKILL)
        rig = Rig(folder, base)
        acknowledged, steps = rig.arena.durable & ((1 << 40) - 1), rig.stored()[0]
        assert (steps >= np.where(rig.arena.durable >= 0, acknowledged, -1)).all()  # none that does not exist
        rig.arena.adopt()
        intact = rig.arena.intact()
        thread = PersisterThread(rig.persister)
        assert thread.drain(30), thread.fault()
        thread.close()
        assert not (rig.arena.pending() & intact).any()
        steps, content = rig.stored()
        assert (steps % 251 == content).all()  # nothing torn, nothing under a wrong step
        assert (steps[intact] == (rig.arena.version & ((1 << 40) - 1))[intact]).all()
        rig.close(killed=True)
