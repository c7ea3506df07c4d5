"""Provide the tests of saving with a rig, whose store is verified at the end, and a daemon."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scarctl.arena.folder import host_folder
from scarctl.daemon import client, protocol
from scarctl.daemon.server import Daemon
from scarctl.errors import ScarError
from scarctl.persist.persister import Persister
from tests.daemon.rig import Rig
from tests.daemon.trainer import Trainer, stop
from tests.support import daemons


@pytest.fixture(autouse=True)
def forked_daemons(monkeypatch: pytest.MonkeyPatch) -> None:
    daemons.fork(monkeypatch)


@pytest.fixture
def rig(tmp_path: Path, arena_dir: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "store", arena_dir)
    yield made
    made.close()


@pytest.fixture
def folder(arena_dir: Path) -> Iterator[Path]:
    """Yield the folder of the daemon. Stop the daemon at the end, and remove its socket."""
    folder = host_folder(str(arena_dir))
    yield folder
    with contextlib.suppress(ScarError):
        stop(folder)
    (folder / protocol.SOCKET).unlink(missing_ok=True)


@pytest.fixture
def daemon(arena_dir: Path) -> Iterator[Daemon]:
    """Yield a daemon in a thread of this process. Sessions find it, so `client.start` is never needed."""
    folder = host_folder(str(arena_dir))
    folder.mkdir(mode=0o700)
    made = Daemon(folder)
    thread = threading.Thread(target=made.serve)
    thread.start()
    client.ask(folder, "hold", seconds=60)
    yield made
    made.terminate()
    thread.join(20)
    assert not thread.is_alive()
    assert not (folder / protocol.SOCKET).exists()


@pytest.fixture
def trainer(request: pytest.FixtureRequest, arena_dir: Path, tmp_path: Path) -> Trainer:
    """Return the saving side of a session, with the daemon of the thread if the test has it."""
    request.getfixturevalue("daemon" if "daemon" in request.fixturenames else "folder")
    return Trainer(tmp_path / "store", arena_dir)


@pytest.fixture
def connection(daemon: Daemon) -> Iterator[socket.socket]:
    with protocol.connect(daemon.folder, 10) as made:
        yield made


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Make every tensor take a second to be read until this event is set: of many, nothing is saved until then."""
    fast, source = threading.Event(), Persister._uninterrupted

    def reading(self: Persister, *arguments: Any) -> Any:
        fast.wait(1.0)
        return source(self, *arguments)

    monkeypatch.setattr(Persister, "_uninterrupted", reading)
    yield fast
    fast.set()
