"""Test sessions that resume from fetched memory, and daemons that are killed while they send it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scarctl.arena.arena import Arena
from scarctl.arena.folder import arena_folder, host_folder
from scarctl.peers.fetch import Asker, Fetched, fetch_memory
from scarctl.peers.host import Host
from scarctl.peers.sender import Candidate
from scarctl.store import Store
from scarctl.store.members import join_members
from tests.daemon.trainer import stop
from tests.peers.fetched_member import MEMBER, attached, state_of, train
from tests.peers.lending import SECRET, START
from tests.support.process import Forked

pytestmark = pytest.mark.leaves_arena


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[str, str]]:
    names = ("east", "west")
    for name in names:
        (tmp_path / name).mkdir()
    yield str(tmp_path / "east"), str(tmp_path / "west")
    for name in names:
        stop(host_folder(str(tmp_path / name)))


def view_of(store: Path) -> Store:
    opened = Store.open(str(store))
    shard = join_members(opened, MEMBER[1]).shards[MEMBER[0]]
    return opened.of_shard(shard, current=True)


def fetch(store: Path, base: str, *hosts: Candidate) -> Fetched | None:
    view = view_of(store)
    try:
        return fetch_memory(view, base, hosts, Asker(START, SECRET, None, 20.0))
    finally:
        view.close()


def arena_at(store: Path, base: str) -> Arena:
    run = view_of(store).run_id
    arena = Arena.share(arena_folder(base, run), run_id=run)
    assert arena is not None
    return arena


def undisturbed(tmp_path: Path, steps: int, mib: float = 0.1) -> dict[str, np.ndarray[Any, Any]]:
    calm = tmp_path / "calm"
    calm.mkdir()
    state = state_of(mib)
    session = attached(calm / "store", str(calm), state, daemon=False)
    train(session, state, steps)
    session.close()
    return state


def test_a_session_resumes_bit_for_bit_from_fetched_memory(tmp_path: Path, hosts: tuple[str, str]) -> None:
    """The store has step 5. Step 13 was flushed, and waits, and the process was killed. Nobody saves it."""
    east, west = hosts
    store, away = tmp_path / "store", tmp_path / "away"

    def body(tell: Any) -> None:
        state = state_of(0.1)
        session = attached(store, east, state, daemon=False)
        session.resume()
        train(session, state, 5)
        session.checkpoint(full=True, wait=True)
        store.rename(away)
        train(session, state, 8)
        assert session.flush()
        tell("flushed")
        signal.pause()

    with Forked(body) as child:
        child.expect("flushed", 60.0)
        child.signal(signal.SIGKILL)
        child.wait()
    away.rename(store)
    assert arena_at(store, east).lacking()
    home = host_folder(east)
    host = Host(home)
    run = view_of(store).run_id
    port = host.admit(START, SECRET, run.partition("-")[0], "127.0.0.1", 0)
    assert fetch(store, west, Candidate("east", "127.0.0.1", port)) is not None
    host.close()
    state = state_of(0.1)
    session = attached(store, west, state, daemon=False)
    resumed = session.resume()
    assert (resumed.step, resumed.consistent, resumed.reasons) == (13, True, ())
    train(session, state, 4)
    session.close()
    calm = undisturbed(tmp_path, 17)
    assert {name: array.tobytes() for name, array in state.items()} == {
        name: array.tobytes() for name, array in calm.items()
    }


@contextlib.contextmanager
def killed_member(store: Path, base: str, mib: float, steps: int) -> Iterator[Candidate]:
    """Yield the daemon of a member that was killed at this step."""
    words = [str(store), base, str(mib), str(steps), START, SECRET.hex()]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.peers.fetched_member", *words], stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        port = int(program.stdout.readline())
        program.kill()
    yield Candidate(Path(base).name, "127.0.0.1", port)


@pytest.mark.long
def test_a_daemon_lends_the_memory_of_a_killed_member(tmp_path: Path, hosts: tuple[str, str]) -> None:
    """It may still be saving it: either way the next process resumes where the killed one was."""
    east, west = hosts
    store = tmp_path / "store"
    with killed_member(store, east, 0.1, 13) as host:
        found = fetch(store, west, host)
    assert found is not None
    assert found.host == "east"
    state = state_of(0.1)
    session = attached(store, west, state, daemon=True)
    resumed = session.resume()
    assert (resumed.step, resumed.consistent) == (13, True)
    train(session, state, 4)
    session.close()
    calm = undisturbed(tmp_path, 17)
    assert {name: array.tobytes() for name, array in state.items()} == {
        name: array.tobytes() for name, array in calm.items()
    }
