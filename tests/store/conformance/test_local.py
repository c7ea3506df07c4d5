"""Run the conformance suite in a local folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from scarctl.store.backends.base import Blobs
from tests.store.conformance.suite import BlobsConformance, StoreConformance
from tests.support.places import Folder, Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    root = tmp_path / "run"
    root.mkdir()
    return Place(str(root), Folder(root))


class TestBlobs(BlobsConformance):
    def test_a_segment_is_created_exclusively_because_that_is_free(self, blobs: Blobs, place: Place) -> None:
        place.raw.put("a/x", b"there")
        with pytest.raises(FileExistsError), blobs.writer("a/x"):
            pass
        assert place.raw.get("a/x") == b"there"


class TestStore(StoreConformance): ...
