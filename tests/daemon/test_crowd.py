"""Test more sessions than a daemon can serve: those that find it full save from a thread, at once."""

from __future__ import annotations

import contextlib
import logging
import resource
import time
from pathlib import Path

import pytest

from scarctl.config import SessionSettings
from scarctl.daemon import client, protocol
from scarctl.errors import ScarError, Unavailable
from scarctl.persist.saver import Saver
from scarctl.session.opening import claim_saver
from scarctl.store import Store


@pytest.fixture(autouse=True)
def forked_daemons() -> None:
    """Start daemons as users do, by overriding what other tests do."""


@pytest.fixture
def room_for_two(folder: Path) -> int:
    """Return the limit of open files with which a daemon serves two sessions."""
    pid = client.hold(folder, 60)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (78, 78))
    return pid


def claim(path: Path, arena_dir: Path, *, daemon: bool | None = None) -> Saver:
    store = Store.create(str(path))
    settings = SessionSettings(store=str(path), arena_dir=str(arena_dir), daemon=daemon)
    try:
        return claim_saver(store, settings, lambda request: None)
    except ScarError:
        store.close()
        raise


@pytest.mark.usefixtures("room_for_two")
def test_one_too_many_saves_from_a_thread(
    tmp_path: Path, arena_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.ExitStack() as stack, caplog.at_level(logging.WARNING):
        savers = []
        for number in range(2):
            savers.append(claim(tmp_path / f"run-{number}", arena_dir))
            stack.callback(savers[-1].close)
        assert caplog.text == ""
        started = time.monotonic()
        savers.append(claim(tmp_path / "run-2", arena_dir))
        stack.callback(savers[-1].close)
        assert time.monotonic() - started < client.START_SECONDS / 2
        assert [saver.outlives for saver in savers] == [True, True, False]
        assert "the daemon already serves 2 sessions, its limit" in caplog.text
        assert "in a thread of this process" in caplog.text
        with pytest.raises(Unavailable) as caught:
            claim(tmp_path / "run-3", arena_dir, daemon=True)
        assert caught.value.kind == "daemon-full"


@pytest.mark.usefixtures("room_for_two")
def test_connections_that_are_too_many_learn_why(folder: Path) -> None:
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(protocol.connect(folder, 10)) for _ in range(60)]
        for connection in connections[:36]:
            client.request(connection, "status")
        with pytest.raises(Unavailable) as caught:
            client.request(connections[36], "status")
        assert caught.value.kind == "daemon-full"


def test_the_limit_of_open_files_is_raised(folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 200), hard))
    try:
        pid = client.hold(folder, 60)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] > 200
