"""Test whether processes exist, and how they are named."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from scarctl.util.process import exists


def test_only_a_process_that_has_not_ended_exists() -> None:
    assert exists(os.getpid())
    assert exists(1), "it may be another user's"
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert not exists(process.pid)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux shows it")
def test_a_process_that_its_parent_has_not_collected_has_ended() -> None:
    """As after `kill -9` of a rank until its launcher looks, or forever if process 1 of a container collects none."""
    process = subprocess.Popen(["sleep", "60"])
    assert exists(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not exists(process.pid)
    process.wait()


def test_groups_are_no_processes() -> None:
    assert not exists(0)
    assert not exists(-os.getpgrp())
