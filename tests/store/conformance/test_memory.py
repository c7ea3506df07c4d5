"""Run the conformance suite in fsspec's file system in memory, which is synchronous."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.store.conformance.suite import BlobsConformance, StoreConformance
from tests.support.places import Memory, Place


@pytest.fixture
def place() -> Iterator[Place]:
    root = f"/{uuid.uuid4().hex}/run"
    raw = Memory(root)
    yield Place(f"memory:/{root}", raw, lasting=False)
    if raw.fs.exists(root):
        raw.fs.rm(root, recursive=True)


class TestBlobs(BlobsConformance): ...


class TestStore(StoreConformance): ...
