"""Start daemons as forks of a process that has their modules: to import these takes longer than all the rest."""

from __future__ import annotations

import pytest

from scarctl.daemon import client
from tests.support import forkserver

MODULES = ("scarctl.daemon.__main__",)


def fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process start daemons as forks."""
    monkeypatch.setattr(client, "subprocess", forkserver.Forks(MODULES))
