"""Provide a place for an arena, and the daemon's fixtures: a rig, a daemon in a thread, and a connection to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.daemon.conftest import connection, daemon, rig
from tests.daemon.rig import STORE_ID

__all__ = ["connection", "daemon", "rig"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return the folder of an arena."""
    return tmp_path / "scarctl-0" / STORE_ID
