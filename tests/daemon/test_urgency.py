"""Test that the daemon is nice, except while a training process waits for an answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fsspec.asyn import get_loop, iothread

from scarctl.daemon import client
from scarctl.daemon.saver import DaemonSaver
from scarctl.daemon.server import Daemon
from scarctl.daemon.urgency import Urgency
from scarctl.store import Store
from scarctl.util.niceness import POLITE, set_session
from tests.daemon.trainer import Trainer
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/autogroup").exists(), reason="the processor is not shared among sessions here"
)


def niceness(pid: int) -> int:
    """Return the niceness of a process's session."""
    return int(Path(f"/proc/{pid}/autogroup").read_text().rpartition("nice ")[2])


def test_it_hurries_from_the_question_to_the_answer(folder: Path, tmp_path: Path) -> None:
    """A stopped daemon does not answer, like one that gets no processor time."""
    own = Path("/proc/self/autogroup")  # empty where no session was begun since the system's start
    daemon, mine = client.hold(folder, 60), own.read_text()
    wait_until(lambda: niceness(daemon) == 10)
    store = Store.create(tmp_path / "store")
    saver = DaemonSaver(store.url, store.run_id, folder, lambda request: None)
    os.kill(daemon, signal.SIGSTOP)
    try:
        claim = threading.Thread(target=saver.claim)
        claim.start()
        wait_until(lambda: niceness(daemon) == 0)
    finally:
        os.kill(daemon, signal.SIGCONT)
    claim.join()
    wait_until(lambda: niceness(daemon) == 10)
    assert own.read_text() == mine
    saver.close()


def test_a_process_that_dies_before_it_asks() -> None:
    """It lowers the niceness first, and the daemon never hears of it."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        urgency = Urgency(other.pid)
        wait_until(lambda: urgency.rest() or niceness(other.pid) == 10)
        wait_until(lambda: set_session(0, other.pid) or niceness(other.pid) == 0)
        wait_until(lambda: urgency.rest() or niceness(other.pid) == 10)
        other.kill()


def test_requests_to_a_remote_store_are_polite(daemon: Daemon, arena_dir: Path, tmp_path: Path) -> None:
    """fsspec starts the thread that sends them, with the niceness of the thread that opens the first store."""
    get_loop()
    assert iothread[0] is not None
    Trainer(tmp_path / "store", arena_dir).close()
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, iothread[0].native_id) == min(19, usual + POLITE)


AN_ANSWER = """
import os, subprocess, time
from pathlib import Path
from scarctl.daemon.urgency import Urgency
from scarctl.util.niceness import set_session
os.setuid(65534)  # after the imports, which this user may not be allowed to read
other = subprocess.Popen(["sleep", "60"], start_new_session=True)
session, seen = Path(f"/proc/{other.pid}/autogroup"), []
urgency = Urgency(other.pid)
for wanted in (10, 0, 10):
    end = time.monotonic() + 20
    while not session.read_text().endswith(f"nice {wanted}\\n") and time.monotonic() < end:
        urgency.rest() if wanted else set_session(0, other.pid)
        time.sleep(0.01)
    seen.append(int(session.read_text().rpartition("nice ")[2]))
    if not wanted:
        with urgency.answering():
            pass
other.kill()
print(*seen)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_ordinary_user() -> None:
    """The system refuses a user's second change within 0.1 s: the daemon's, right after the asking process's."""
    done = subprocess.run([sys.executable, "-c", AN_ANSWER], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["10", "0", "10"], done.stderr


@pytest.mark.parametrize("alone", [True, False])
def test_answers_that_overlap(alone: bool) -> None:
    """It is nice again once the last answer is given."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        urgency = Urgency(other.pid if alone else 0)
        seen = []
        with urgency.answering():
            with urgency.answering():
                urgency.rest()
                seen.append(niceness(other.pid))
            urgency.rest()
            seen.append(niceness(other.pid))
        if alone:
            wait_until(lambda: urgency.rest() or niceness(other.pid) == 10)
        else:
            urgency.rest()
            seen.append(niceness(other.pid))
        other.kill()
    assert set(seen) == {0}
