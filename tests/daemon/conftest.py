"""A rig per test, taken apart and its store verified at the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.rig import Rig


@pytest.fixture
def rig(tmp_path: Path, arena_dir: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "store", arena_dir)
    yield made
    made.close()
