"""Start programs, and end all of their processes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from scarctl.rehearse import processes
from scarctl.rehearse.run import Run
from scarctl.util.process import exists


@pytest.fixture
def run(tmp_path: Path) -> Run:
    folder = tmp_path / "whole" / "first"
    folder.mkdir(parents=True)
    return Run(str(folder), "", "scarctl-rehearsal-x", 8, 1)


def start(run: Run, script: str, timeout: float = 60.0, done: bool = False) -> int | None:
    words = ["sh", "-c", script]
    return processes.run(words, run.to_environment(), Path(run.folder), timeout, lambda: done)


def test_the_exit_code_and_the_end_of_the_output(run: Run) -> None:
    assert start(run, "for i in $(seq 30); do echo line $i; done; echo failed >&2; exit 7") == 7
    lines = processes.tail(Path(run.folder))
    assert (len(lines), lines[0], lines[-2:]) == (20, "line 12", ["line 30", "failed"])
    assert start(run, "kill -TERM $$") == -15


def test_a_program_that_takes_too_long_is_ended(run: Run) -> None:
    began = time.monotonic()
    assert start(run, "sleep 60", timeout=0.3) is None
    assert time.monotonic() - began < 30


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_processes_that_leave_the_group_are_ended_too(run: Run) -> None:
    start(run, "setsid sleep 300 & echo $!; exit 0")
    (pid,) = processes.tail(Path(run.folder))
    assert not exists(int(pid))


def test_a_program_may_linger_only_for_a_moment_after_its_sessions(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_GRACE", 0.2)
    assert start(run, "sleep 60", done=True) == 0
