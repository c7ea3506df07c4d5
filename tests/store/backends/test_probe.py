"""Test that places without exclusive creation are recognised, whichever way they fail."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from scarctl.errors import MissingGuarantee
from scarctl.store import Store
from scarctl.store.backends import client, exclusive
from scarctl.store.backends.aside import Aside
from scarctl.store.backends.local import LocalBlobs
from scarctl.store.backends.probe import race
from scarctl.store.doctor import diagnose


class LooksFirst(MemoryFileSystem):  # type: ignore[misc]
    """Checks whether the file exists, and then writes, as many file systems do."""

    protocol = "looksfirst"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        if mode == "create" and self.exists(path):
            raise FileExistsError(path)
        time.sleep(0.002)
        super().pipe_file(path, value)


class Ignores(MemoryFileSystem):  # type: ignore[misc]
    """Ignores the request for exclusive creation."""

    protocol = "ignores"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        super().pipe_file(path, value)


class Remembers(MemoryFileSystem):  # type: ignore[misc]
    """Remembers which files were absent, and forgets it only for what it writes itself."""

    protocol = "remembers"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.absent: set[str] = set()

    def info(self, path: str, **kwargs: Any) -> Any:
        if path in self.absent:
            raise FileNotFoundError(path)
        try:
            return super().info(path, **kwargs)
        except FileNotFoundError:
            self.absent.add(path)
            raise

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self.absent.discard(path)
        if mode == "create" and path in self.store:
            raise FileExistsError(path)
        super().pipe_file(path, value)


class RemembersLists(Remembers):
    """Remembers what a folder had, and forgets it only when it changes the folder itself."""

    protocol = "rememberslists"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lists: dict[str, Any] = {}

    def info(self, path: str, **kwargs: Any) -> Any:
        return MemoryFileSystem.info(self, path, **kwargs)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        if path not in self.lists:
            self.lists[path] = super().ls(path, detail, **kwargs)
        return self.lists[path]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self.lists.clear()
        super().pipe_file(path, value, mode)

    def rm_file(self, path: str) -> None:
        self.lists.clear()
        super().rm_file(path)


class NoLock:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _at_once(call: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
    return future


@pytest.fixture(params=[LooksFirst, Ignores])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    import fsspec

    fsspec.register_implementation(request.param.protocol, request.param, clobber=True)
    # Its threads do not take turns, and it counts as sending a condition: only the trial remains.
    monkeypatch.setattr(client, "_create_lock", NoLock())
    monkeypatch.setattr(Aside, "start", lambda aside, call: _at_once(call))
    known = exclusive.CONDITIONAL | {(__name__, request.param.__qualname__)}
    monkeypatch.setattr(exclusive, "CONDITIONAL", known)
    return f"{request.param.protocol}://{uuid.uuid4().hex}/run"


def test_a_store_is_refused(url: str) -> None:
    with pytest.raises(MissingGuarantee, match=r"racers won|overwrote") as caught:
        Store.create(url)
    assert "--assume-single-writer" in caught.value.hint
    store = Store.create(url, assume_single_writer=True)
    assert not store.blobs.exclusive
    assert not Store.open(url).blobs.exclusive


@pytest.mark.parametrize("cls", [LooksFirst, Ignores])
def test_what_is_not_known_is_refused_however_a_race_goes(cls: type[MemoryFileSystem]) -> None:
    import fsspec

    fsspec.register_implementation(cls.protocol, cls, clobber=True)
    url = f"{cls.protocol}://{uuid.uuid4().hex}/run"
    with pytest.raises(MissingGuarantee, match="is not known to create a file by one conditional request"):
        Store.create(url)
    assert not diagnose(url, rounds=1).exclusive


@pytest.mark.parametrize("scheme", ["ftp", "sftp", "smb", "webhdfs", "github", "local", "dir", "reference"])
def test_file_systems_of_fsspec_that_look_first(scheme: str) -> None:
    try:
        why = exclusive.why_not_exclusive(scheme)
    except ImportError:
        pytest.skip(f"a package for {scheme}:// is missing")
    assert why is not None
    assert "checks whether the file exists" in why


@pytest.mark.parametrize("scheme", ["s3", "s3a", "memory"])
def test_file_systems_that_create_at_once(scheme: str) -> None:
    assert exclusive.why_not_exclusive(scheme) is None


def test_doctor_says_so(url: str) -> None:
    found = diagnose(url, rounds=3)
    assert not found.sound
    assert not found.exclusive
    assert found.left_behind == []


def test_doctor_leaves_no_folder_that_it_made(tmp_path: Path) -> None:
    assert diagnose(str(tmp_path / "not" / "yet"), rounds=1).sound
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize(
    ("cls", "failed", "sound"),
    [(Remembers, "absent-then-there", True), (RemembersLists, "list-after-write", False)],
)
def test_doctor_finds_what_a_client_remembers(
    cls: type[MemoryFileSystem], failed: str, sound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's own changes are seen, another's are not. Only a list of snapshots has to be new."""
    import fsspec

    fsspec.register_implementation(cls.protocol, cls, clobber=True)
    known = exclusive.CONDITIONAL | {(__name__, one.__qualname__) for one in (Remembers, RemembersLists)}
    monkeypatch.setattr(exclusive, "CONDITIONAL", known)
    found = diagnose(f"{cls.protocol}://{uuid.uuid4().hex}/run", rounds=1, large_bytes=1 << 20)
    assert [check.name for check in found.checks if not check.ok] == [failed]
    assert found.sound == sound


def test_an_interrupted_race_leaves_no_racer_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, []

    def interrupted(thread: threading.Thread) -> None:
        if len(started) == 5:
            raise KeyboardInterrupt
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        race(LocalBlobs(tmp_path), "", rounds=1)
    assert len(started) == 5
    assert not any(thread.is_alive() for thread in started)
    assert not list(tmp_path.iterdir())
