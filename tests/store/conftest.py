"""Provide a small store to write to."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from scarctl.state.layout import Layout
from scarctl.store import Store, StoreWriter, open_writer
from tests.store.helpers import Data, memory_folder, small_layout


@pytest.fixture(scope="session")
def layout() -> Layout:
    return small_layout()


@pytest.fixture
def memory_path() -> Iterator[Path]:
    folder = memory_folder()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def data(layout: Layout) -> Data:
    return Data(layout)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "run")


@pytest.fixture
def writer(store: Store, layout: Layout) -> Iterator[StoreWriter]:
    with open_writer(store, layout=layout) as writer:
        yield writer
