"""Start daemons as forks of a process that has their modules: to import these takes longer than all the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scarctl.daemon import client
from tests.support import forkserver

MODULES = ("scarctl.daemon.__main__",)
PYTHON = sys.executable


class Forks:
    """Stand for the module `subprocess` in `scarctl.daemon.client`, which starts nothing but daemons."""

    def __init__(self) -> None:
        self._owner = os.getpid()

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def run(self, command: list[str], **options: Any) -> Any:
        # A forked process does not share the server with its parent; a test may name another interpreter.
        if os.getpid() != self._owner or command[0] != PYTHON:
            return subprocess.run(command, **options)
        done = forkserver.run(
            command[1:],
            timeout=options["timeout"],
            env=options["env"],
            cwd=Path(options["cwd"]),
            imports=MODULES,
        )
        return subprocess.CompletedProcess(command, done.returncode, None, done.stderr.encode())


def fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process start daemons as forks."""
    monkeypatch.setattr(client, "subprocess", Forks())
