"""Provide hosts of members."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.copied_member import Hosts, hosts


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """Yield hosts, without a member so far."""
    monkeypatch.delenv("SCARCTL_DAEMON")
    with hosts(tmp_path, tmp_path / "store") as made:
        yield made


@pytest.fixture
def two(alone: Hosts) -> Hosts:
    """Return hosts: member 0 trains on "east", member 1 on "west", and each has a copy on the other's host."""
    return alone.both()
