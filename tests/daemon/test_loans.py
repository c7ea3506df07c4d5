"""Test that a daemon lends a dead process's arena: it does not change meanwhile, and nothing is given up for it."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scarctl.arena.arena import Arena
from scarctl.arena.extras import read_extras
from scarctl.arena.folder import arena_folder
from scarctl.arena.transfer import Outgoing
from scarctl.daemon import client
from scarctl.daemon import server as servers
from scarctl.daemon.saver import DaemonSaver
from scarctl.daemon.server import Daemon
from scarctl.peers import fetch as fetching
from scarctl.peers import lender as lenders
from scarctl.peers.connect import connected
from scarctl.peers.fetch import Asker, Fetched, fetch_memory
from scarctl.peers.frames import Kind, encode
from scarctl.peers.handshake import SECRET_BYTES, Hello
from scarctl.peers.sender import Candidate
from scarctl.state.version import step_of
from scarctl.store import Store
from scarctl.store.store import Part
from tests.daemon.trainer import Trainer, assert_sound, many_tensors, status
from tests.support.waiting import wait_until

pytestmark = pytest.mark.leaves_arena
PART = Part(3)
START, SECRET = "11" * 16, secrets.token_bytes(SECRET_BYTES)


class Sending:
    """Holds all pieces of arenas back until `go` is set. `began`: one is about to be sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.go = threading.Event(), threading.Event()
        read = Outgoing.read

        def held(outgoing: Outgoing, at: int, size: int) -> Any:
            self.began.set()
            assert self.go.wait(60.0)
            return read(outgoing, at, size)

        monkeypatch.setattr(Outgoing, "read", held)
        # So that a check after the first piece comes before the last one.
        monkeypatch.setattr(lenders, "PIECE", 4096)
        monkeypatch.setattr(fetching, "PIECE", 4096)


class Elsewhere:
    """Another host, to which the run's memory is fetched, in a thread if necessary."""

    def __init__(self, folder: Path, trainer: Trainer) -> None:
        folder.mkdir()
        self.base, self.store = str(folder), str(trainer.store.root)
        port = trainer.saver.admit(START, SECRET.hex(), "127.0.0.1", None)
        self.host = Candidate("here", "127.0.0.1", port)
        self.found: list[Fetched | None] = []
        self._thread = threading.Thread(target=lambda: self.found.append(self.fetch()))

    def view(self) -> Store:
        return Store.open(self.store).of_shard(PART.shard)

    def fetch(self) -> Fetched | None:
        view = self.view()
        try:
            return fetch_memory(view, self.base, [self.host], Asker(START, SECRET, None, 20.0))
        finally:
            view.close()

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> Fetched | None:
        self._thread.join(60.0)
        (found,) = self.found
        return found

    def arena(self) -> Arena:
        run = self.view().run_id
        found = Arena.share(arena_folder(self.base, run), run_id=run)
        assert found is not None
        return found


@pytest.fixture
def trainer(daemon: Daemon, arena_dir: Path, tmp_path: Path) -> Trainer:
    """Return a training process whose step 1 is in the store."""
    made = Trainer(tmp_path / "store", arena_dir, shards=1, part=PART, layout=many_tensors())
    made.save_durably(1)
    return made


@pytest.fixture
def elsewhere(tmp_path: Path, trainer: Trainer) -> Elsewhere:
    return Elsewhere(tmp_path / "elsewhere", trainer)


def die_with_pending_copies(trainer: Trainer) -> None:
    """Let the training process die right after step 2, of which nothing is in the store."""
    trainer.save(trainer.everything, 2, sealed=True)
    trainer.die()


@pytest.fixture
def lent(
    trainer: Trainer, slow: threading.Event, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Sending]:
    """Let memory of which nothing is in the store be on its way elsewhere, before its first piece."""
    sending = Sending(monkeypatch)
    die_with_pending_copies(trainer)
    elsewhere.begin()
    assert sending.began.wait(60.0)
    yield sending
    sending.go.set()


def test_a_run_that_is_attached_is_not_lent(
    daemon: Daemon, trainer: Trainer, elsewhere: Elsewhere, caplog: pytest.LogCaptureFixture
) -> None:
    assert elsewhere.fetch() is None
    assert "its process lives on here" in caplog.text
    trainer.arena.take_over(0x7FFFFFF0)  # even if its process seems to be dead
    assert elsewhere.fetch() is None
    trainer.save_durably(2)
    trainer.close()


def test_saving_stops_for_it_and_the_store_is_free_afterwards(
    daemon: Daemon, trainer: Trainer, elsewhere: Elsewhere, slow: threading.Event, lent: Sending
) -> None:
    slow.set()
    before = {path.name: path.read_bytes() for path in trainer.arena.folder.iterdir()}
    assert trainer.phases() == ["orphaned"]
    assert not (trainer.arena.durable == trainer.arena.version).any()
    lent.go.set()
    found = elsewhere.end()
    assert found is not None
    assert found.host == "here"
    arena = elsewhere.arena()
    assert arena.slot.memory().tobytes() == trainer.arena.slot.memory().tobytes()
    assert set(step_of(arena.version)) == {2}
    found = read_extras(arena)
    assert found is not None
    assert found.tree == {"step": 2}
    # Nothing was saved since, and the daemon has let go: a process elsewhere can claim the store at once.
    assert trainer.phases() == []
    assert {path.name: path.read_bytes() for path in trainer.arena.folder.iterdir()} == before
    assert set(trainer.stored()[0]) == {1}
    view = elsewhere.view()
    view.lock()
    view.close()


def test_saving_continues_after_a_fetch_that_failed(
    daemon: Daemon,
    trainer: Trainer,
    elsewhere: Elsewhere,
    tmp_path: Path,
    slow: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here its bytes are damaged on the way."""
    die_with_pending_copies(trainer)
    read = Outgoing.read

    def damaged(outgoing: Outgoing, at: int, size: int) -> Any:
        data = read(outgoing, at, size)
        data[-1] ^= 1
        return data

    monkeypatch.setattr(Outgoing, "read", damaged)
    assert elsewhere.fetch() is None
    slow.set()
    wait_until(lambda: trainer.phases() == [])
    assert set(trainer.stored()[0]) == {2}
    assert_sound(tmp_path / "store")


def test_who_does_not_read_is_not_waited_for(
    daemon: Daemon,
    trainer: Trainer,
    elsewhere: Elsewhere,
    slow: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another host asks for the arena, and then says nothing: saving continues, and the arena's lock is free."""

    monkeypatch.setattr(lenders, "REPLY_SECONDS", 0.5)
    die_with_pending_copies(trainer)
    hello = Hello.new(START, trainer.store.run_id, 1)
    with connected("127.0.0.1", elsewhere.host.port, hello, SECRET, None) as channel:
        channel.send(encode(Kind.FETCH, {}))
        channel.expect(Kind.FETCH)
        assert not (trainer.arena.durable == trainer.arena.version).any()
        slow.set()
        wait_until(lambda: trainer.phases() == [])
    assert set(trainer.stored()[0]) == {2}
    run = trainer.store.run_id
    again = Arena.open_existing(trainer.arena.folder, run_id=run)
    assert again is not None
    again.close()


def test_a_process_of_this_host_ends_the_loan(
    daemon: Daemon,
    trainer: Trainer,
    arena_dir: Path,
    elsewhere: Elsewhere,
    tmp_path: Path,
    slow: threading.Event,
    lent: Sending,
) -> None:
    claimed: list[Trainer] = []
    again = threading.Thread(
        target=lambda: claimed.append(
            Trainer(tmp_path / "store", arena_dir, shards=1, part=PART, layout=many_tensors())
        )
    )
    again.start()
    wait_until(lambda: daemon.runs._wanted)
    lent.go.set()
    again.join(60.0)
    slow.set()
    assert elsewhere.end() is None
    (next_one,) = claimed
    assert next_one.arena.pending().all()
    next_one.drained()
    assert set(next_one.stored()[0]) == {2}
    next_one.close()


def test_a_run_that_was_released_is_lent_too(daemon: Daemon, trainer: Trainer, elsewhere: Elsewhere) -> None:
    """The daemon has saved everything. The memory is still what a process elsewhere needs to resume quickly."""
    die_with_pending_copies(trainer)
    wait_until(lambda: trainer.phases() == [])
    assert elsewhere.fetch() is not None
    assert set(step_of(elsewhere.arena().version)) == {2}
    assert not elsewhere.arena().pending().any()


def test_a_claimed_run_that_was_never_opened_is_lent_once_the_daemon_has_looked_at_it(
    daemon: Daemon, trainer: Trainer, elsewhere: Elsewhere, slow: threading.Event
) -> None:
    """The next process died before it opened its arena: the daemon opens it, in a new epoch."""
    die_with_pending_copies(trainer)
    run, folder = trainer.store.run_id, trainer.folder
    next_one = DaemonSaver(str(trainer.store.root), run, folder, lambda _: None, part=PART)
    next_one.claim()
    assert elsewhere.fetch() is None
    next_one.abandon()
    wait_until(lambda: trainer.phases() in (["orphaned"], []))
    found = elsewhere.fetch()
    slow.set()
    assert found is not None
    assert set(step_of(elsewhere.arena().version)) == {2}


@pytest.mark.parametrize("in_time", [True, False])
def test_a_daemon_that_ends_finishes_a_fetch_within_seconds_or_refuses_it(
    daemon: Daemon,
    trainer: Trainer,
    elsewhere: Elsewhere,
    slow: threading.Event,
    lent: Sending,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    in_time: bool,
) -> None:
    monkeypatch.setattr(lenders, "GRACE_SECONDS", 60.0 if in_time else 0.0)
    monkeypatch.setattr(lenders, "_LATE_SECONDS", 60.0)
    client.ask(daemon.folder, "stop")
    wait_until(lambda: daemon.host._lender._until is not None)
    assert elsewhere.fetch() is None  # nobody else begins
    lent.go.set()
    found = elsewhere.end()
    assert (found is not None) == in_time
    if not in_time:
        assert "the daemon is ending" in caplog.text
    wait_until(lambda: status(daemon.folder) is None)
    slow.set()
    assert set(trainer.stored()[0]) == {1}


def test_a_fetch_does_not_keep_a_host_that_shuts_down_from_saving(
    daemon: Daemon,
    trainer: Trainer,
    elsewhere: Elsewhere,
    slow: threading.Event,
    lent: Sending,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The daemon has received SIGTERM, and saves what it can. Another host has not even got the first piece."""
    monkeypatch.setattr(lenders, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr("scarctl.daemon.lifecycle.LAST_SAVES", 120.0)
    daemon._terminated = True
    wait_until(lambda: daemon.host._lender._until is not None)
    lent.go.set()
    assert elsewhere.end() is None
    slow.set()
    wait_until(lambda: status(daemon.folder) is None)
    daemon._terminated = False  # the fixture ends it once more
    assert set(trainer.stored()[0]) == {2}


def test_an_evacuation_ends_a_fetch_and_saves_everything(
    daemon: Daemon,
    trainer: Trainer,
    elsewhere: Elsewhere,
    slow: threading.Event,
    lent: Sending,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time for the fetch is over before its first piece was sent."""
    monkeypatch.setattr(servers, "_FOR_LOANS", 0.0)
    slow.set()
    reports: list[Any] = []
    run = trainer.store.run_id
    evacuation = threading.Thread(target=lambda: reports.append(client.evacuate(daemon.folder, run, 60.0)))
    evacuation.start()
    wait_until(lambda: daemon.runs._wanted)
    lent.go.set()
    assert elsewhere.end() is None
    evacuation.join(120.0)
    assert [report.lost_partitions for report in reports] == [0]
    wait_until(lambda: trainer.phases() == [])
    assert set(trainer.stored()[0]) == {2}
    assert daemon.runs._wanted == []
