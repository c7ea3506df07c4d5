"""Test a store's folder that is away for a while, as if not mounted: the writer is not fenced, and nothing is lost."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scarctl.errors import AccessDenied, Unavailable
from scarctl.state.layout import Layout
from scarctl.store import Store, StoreWriter, verify
from scarctl.store.backends.base import InDoubt
from scarctl.store.backends.local_files import os_error
from scarctl.store.format import SETTINGS, segment_path
from tests.store.helpers import Data, read_all
from tests.store.test_fencing import Hooked, open_at


class Folder:
    """A folder that is mounted at `path`, or not."""

    def __init__(self, path: Path) -> None:
        self.path, self.away = path, path.with_name("away")

    def unmount(self) -> None:
        self.path.rename(self.away)
        self.path.mkdir()

    def vanish(self) -> None:
        self.path.rename(self.away)

    def come_back(self) -> None:
        if self.path.exists():
            assert not [path for path in self.path.rglob("*") if path.is_file()], "written beside the store"
            for path in sorted(self.path.rglob("*"), reverse=True):
                path.rmdir()
            self.path.rmdir()
        self.away.rename(self.path)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    Store.create(tmp_path / "run", shards=1)
    return Folder(tmp_path / "run")


def check(folder: Folder, expected: dict[int, bytes]) -> None:
    store = Store.open(folder.path)
    assert read_all(store, store.state(0)) == (expected, {})
    assert verify(store, read_data=True).problems == []


def record_of(writer: StoreWriter) -> str:
    """Return the path of the newest record."""
    assert writer.state.place is not None
    return writer.state.place.path(0)


@pytest.mark.parametrize("leave", [Folder.vanish, Folder.unmount])
@pytest.mark.parametrize("earlier", [0, 1, 5])
def test_right_after_a_record_was_made(
    folder: Folder, layout: Layout, leave: Callable[[Folder], None], earlier: int
) -> None:
    data, ids = Data(layout), np.arange(layout.partitions)
    writer = open_at(str(folder.path), layout)
    for step in range(1, earlier + 1):
        writer.commit(ids, data, step=step)
    path = f"{writer.state.records + 1}.json"
    inner = writer.store.blobs
    writer.store.blobs = Hooked(inner, path, lambda: leave(folder), after=True)
    with pytest.raises(InDoubt):
        writer.commit(ids, data, step=9)
    for _ in range(2):
        with pytest.raises(InDoubt, match="the store is missing"):
            writer.commit(ids, Data(layout, 1), step=10)
    folder.come_back()
    check(folder, data.all(ids.tolist()))
    newer = Data(layout, 2)
    writer.commit(ids[:3], newer, step=11)
    check(folder, data.all(ids.tolist()) | newer.all([0, 1, 2]))


@pytest.mark.parametrize("leave", [Folder.vanish, Folder.unmount])
def test_between_commits(folder: Folder, layout: Layout, leave: Callable[[Folder], None]) -> None:
    data, ids = Data(layout), np.arange(layout.partitions)
    writer = open_at(str(folder.path), layout)
    writer.commit(ids, data, step=1)
    leave(folder)
    for _ in range(2):
        with pytest.raises(Unavailable):
            writer.commit(ids, Data(layout, 1), step=2)
    folder.come_back()
    newer = Data(layout, 2)
    writer.commit(ids[:3], newer, step=3)
    check(folder, data.all(ids.tolist()) | newer.all([0, 1, 2]))


@pytest.mark.parametrize("again", [False, True])
def test_it_comes_back_while_its_record_is_looked_for(folder: Folder, layout: Layout, again: bool) -> None:
    """The segment of an existing record is not deleted."""
    data, ids = Data(layout), np.arange(layout.partitions)
    writer = open_at(str(folder.path), layout)
    writer.commit(ids, data, step=1)
    path = f"{writer.state.records + 1}.json"
    inner = writer.store.blobs
    writer.store.blobs = Hooked(inner, path, folder.vanish, after=True)
    with pytest.raises(InDoubt):
        writer.commit(ids, data, step=2)

    class ComesBack(Hooked):
        away = False

        def read(self, name: str, limit: int) -> Any:
            found = inner.read(name, limit)
            if "/terms/" in name and self.away:
                self.away = False
                folder.vanish()
            return found

        def has(self, name: str) -> bool:
            if name == SETTINGS and not folder.path.exists():
                folder.come_back()
            return inner.has(name)

    writer.store.blobs = blobs = ComesBack(inner, "none", None)
    newer = Data(layout, 2)
    if again:  # after the look at the claim
        folder.come_back()
        blobs.away = True
        with pytest.raises(InDoubt, match="the folder is gone"):
            writer.commit(ids[:3], newer, step=3)
        check(folder, data.all(ids.tolist()))
    writer.commit(ids[:3], newer, step=3)
    check(folder, data.all(ids.tolist()) | newer.all([0, 1, 2]))


def test_it_is_away_while_the_answer_to_a_repeated_request_is_looked_into(
    folder: Folder, layout: Layout
) -> None:
    """A network file system repeats a request and reports that the file exists: the segment is not deleted."""
    data, ids = Data(layout), np.arange(layout.partitions)
    writer = open_at(str(folder.path), layout)
    writer.commit(ids, data, step=1)
    path = f"{writer.state.records + 1}.json"
    inner = writer.store.blobs

    def repeated() -> None:
        folder.vanish()
        raise FileExistsError(errno.EEXIST, "already exists", path)

    writer.store.blobs = Hooked(inner, path, repeated, after=True)
    newer = Data(layout, 2)
    with pytest.raises(InDoubt):
        writer.commit(ids[:3], newer, step=2)
    folder.come_back()
    check(folder, data.all(ids.tolist()) | newer.all([0, 1, 2]))
    writer.commit(ids[3:5], newer, step=3)
    check(folder, data.all(ids.tolist()) | newer.all([0, 1, 2, 3, 4]))


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_it_may_not_be_looked_into_while_its_record_is_looked_for(
    folder: Folder, layout: Layout, number: int
) -> None:
    """An unknown result is not a failure."""
    data, ids = Data(layout), np.arange(layout.partitions)
    writer = open_at(str(folder.path), layout)
    writer.commit(ids, data, step=1)
    inner = writer.store.blobs
    writer.store.blobs = Hooked(inner, f"{writer.state.records + 1}.json", folder.vanish, after=True)
    newer = Data(layout, 2)
    with pytest.raises(InDoubt):
        writer.commit(ids[:3], newer, step=2)

    class Denied(Hooked):
        def has(self, name: str) -> bool:
            raise os_error(OSError(number, os.strerror(number)), name, "look for")

    writer.store.blobs = Denied(inner, "none", None)
    with pytest.raises(InDoubt, match=os.strerror(number)):
        writer.commit(ids[3:5], newer, step=3)
    writer.store.blobs = inner
    folder.come_back()
    writer.commit(ids[3:5], newer, step=3)
    check(folder, data.all(ids.tolist()) | newer.all([0, 1, 2, 3, 4]))


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_disk_that_does_not_answer_has_lost_no_file(
    folder: Folder, layout: Layout, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, ids = Data(layout), np.arange(layout.partitions)
    writer = open_at(str(folder.path), layout)
    writer.commit(ids, data, step=1)
    lstat = os.lstat

    def fails(path: Any, **options: Any) -> os.stat_result:
        if str(path).endswith(record_of(writer)):
            raise OSError(number, os.strerror(number))
        return lstat(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", fails)
        with pytest.raises(AccessDenied if number == errno.EACCES else Unavailable):
            writer.store.blobs.has(record_of(writer))
    newer = Data(layout, 2)
    writer.commit(ids[:3], newer, step=3)
    check(folder, data.all(ids.tolist()) | newer.all([0, 1, 2]))
    assert not writer.store.blobs.has(segment_path(0, "none"))
