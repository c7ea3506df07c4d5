"""Test the priorities of a thread and of another process's session."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from scarctl.util.niceness import POLITE, be_polite, set_session


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a niceness of their own on Linux only")
def test_one_thread_is_polite() -> None:
    seen = []

    def work() -> None:
        be_polite()
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    before = os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen[0] == min(19, before + POLITE)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a niceness of their own on Linux only")
def test_it_is_nicer_than_training_that_is_nice() -> None:
    """A job that was started with `nice` must not be slowed down by its own checkpoints."""
    program = (
        "import os, threading\n"
        "from scarctl.util.niceness import be_polite\n"
        "def work():\n"
        "    be_polite()\n"
        "    print(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))\n"
        "os.setpriority(os.PRIO_PROCESS, 0, 17)\n"
        "thread = threading.Thread(target=work)\n"
        "thread.start()\n"
        "thread.join()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 19


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="sessions have no niceness here")
def test_the_session_of_another_process() -> None:
    mine = Path("/proc/self/autogroup").read_text()
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        set_session(7, other.pid)
        assert Path(f"/proc/{other.pid}/autogroup").read_text().endswith("nice 7\n")
        other.kill()
    set_session(7, other.pid)  # nothing is raised for a process that has ended
    set_session(7, 0)
    assert Path("/proc/self/autogroup").read_text() == mine
