"""Places that cannot create exclusively are found out, whichever way they fail."""

from __future__ import annotations

import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from scarctl.errors import MissingGuarantee
from scarctl.store import Store, client
from scarctl.store.address import Address
from scarctl.store.doctor import diagnose
from scarctl.store.local import LocalBlobs
from scarctl.store.probe import race
from scarctl.store.store import blobs_at
from tests.support.places import KEY, SECRET, s3_client, s3_server


class LooksFirst(MemoryFileSystem):  # type: ignore[misc]
    """Looks whether the file is there, and then writes: as many file systems do."""

    protocol = "looksfirst"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        if mode == "create" and self.exists(path):
            raise FileExistsError(path)
        time.sleep(0.002)
        super().pipe_file(path, value)


class Ignores(MemoryFileSystem):  # type: ignore[misc]
    """Takes the wish for exclusive creation and does nothing with it."""

    protocol = "ignores"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        super().pipe_file(path, value)


class NoLock:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture(params=[LooksFirst, Ignores])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    import fsspec

    fsspec.register_implementation(request.param.protocol, request.param, clobber=True)
    # As seen by two processes: what keeps the threads of one apart is no help there.
    monkeypatch.setattr(client, "_create_lock", NoLock())
    return f"{request.param.protocol}://{uuid.uuid4().hex}/run"


def test_a_store_is_refused(url: str) -> None:
    with pytest.raises(MissingGuarantee, match=r"racers won|overwrote") as caught:
        Store.create(url)
    assert "--assume-single-writer" in caught.value.hint
    store = Store.create(url, assume_single_writer=True)
    assert not store.blobs.exclusive
    assert not Store.open(url).blobs.exclusive


def test_doctor_says_so(url: str) -> None:
    found = diagnose(url, rounds=3)
    assert not found.sound
    assert not found.exclusive
    assert found.left_behind == []


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


def test_the_s3_server_of_the_tests_has_one_winner() -> None:
    """However its threads take turns: what is tested with it must not fail by its own races."""
    with s3_server() as endpoint:
        s3_client(endpoint).create_bucket(Bucket="winners")
        address = Address.parse(
            "s3://winners/run", {"endpoint_url": endpoint, "key": KEY, "secret": SECRET, "anon": False}
        )
        usual = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            done = race(blobs_at(address), "race-", rounds=10)
        finally:
            sys.setswitchinterval(usual)
    assert done.one_winner == done.rounds == 10, done.problems
