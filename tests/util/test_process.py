from __future__ import annotations

import os
import subprocess

from scarctl.util.process import exists


def test_only_a_process_that_has_not_ended_exists() -> None:
    assert exists(os.getpid())
    assert exists(1), "it may be another user's"
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert not exists(process.pid)


def test_groups_are_no_processes() -> None:
    assert not exists(0)
    assert not exists(-os.getpgrp())
