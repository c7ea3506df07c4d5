"""Run the conformance suite on S3, through s3fs and real HTTP, on a server that the tests start."""

from __future__ import annotations

import pytest

from scarctl.store.backends import s3
from scarctl.store.backends.base import Blobs
from scarctl.store.backends.s3 import PART
from tests.store.conformance.suite import BlobsConformance, StoreConformance, noise
from tests.support.places import Place

pytestmark = pytest.mark.slow


@pytest.fixture
def place(s3_place: Place) -> Place:
    return s3_place


class TestBlobs(BlobsConformance):
    large = 2 * PART + 12_345
    tells_absence = False

    def test_long_listings_come_in_pages(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(s3, "PAGE", 2)
        self.test_listings_show_at_once_what_there_is(self.blobs.__wrapped__(self, place), place)  # type: ignore[attr-defined]

    def test_a_large_file_is_created_exclusively_too(self, blobs: Blobs, place: Place) -> None:
        data = noise(self.large)
        blobs.create_exclusive("a/x", [data[:5], data[5:]])
        assert place.raw.get("a/x") == data
        with pytest.raises(FileExistsError):
            blobs.create_exclusive("a/x", [noise(self.large)])
        assert place.raw.get("a/x") == data


class TestStore(StoreConformance): ...
