"""Run the conformance suite in a local folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.store.conformance.suite import BlobsConformance, StoreConformance
from tests.support.places import Folder, Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    root = tmp_path / "run"
    root.mkdir()
    return Place(str(root), Folder(root))


class TestBlobs(BlobsConformance): ...


class TestStore(StoreConformance): ...
