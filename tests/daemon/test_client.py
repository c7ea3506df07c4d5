"""Test the session's side with a real daemon that dies, hangs, and returns."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from scarctl.arena.folder import host_folder
from scarctl.daemon import client, protocol, saver
from scarctl.daemon.saver import DaemonSaver
from scarctl.errors import Contention, ScarError, Unavailable
from scarctl.store import Store
from scarctl.util.process import exists
from tests.daemon.trainer import Trainer, assert_sound, kill, status
from tests.support.waiting import wait_until


def daemon_of(folder: Path) -> int:
    found = status(folder)
    assert found is not None
    return int(found["pid"])


def test_after_a_kill_another_daemon_goes_on(trainer: Trainer, folder: Path, tmp_path: Path) -> None:
    trainer.save_durably(1, sealed=True)
    epoch = trainer.arena.epoch
    for step in range(2, 5):
        dead = kill(folder)
        trainer.save(trainer.everything[step::3], step)  # no session hears of it
        trainer.drained()
        assert daemon_of(folder) != dead
        assert trainer.arena.epoch > epoch
        epoch = trainer.arena.epoch
    steps, content = trainer.stored()
    assert steps.tolist() == content.tolist()
    assert steps.max() == 4
    trainer.close()
    assert_sound(tmp_path / "store")


def test_a_pause_outlives_the_daemon(trainer: Trainer, folder: Path) -> None:
    trainer.save_durably(1, sealed=True)
    seq = trainer.store.state(0).seq
    trainer.save_durably(2)
    trainer.saver.stop()
    trainer.saver.stop()
    dead = kill(folder)
    trainer.save(trainer.everything, 3)
    wait_until(lambda: trainer.phases() == ["attached"])
    assert daemon_of(folder) != dead
    assert not trainer.saver.drain(1.2), "a new daemon looks at the queue, but must not write"
    assert set(trainer.stored()[0]) == {2}
    kill(folder)
    trainer.saver.roll_back(seq)  # repeat until there is a daemon again
    assert set(trainer.stored()[0]) == {1}
    trainer.save(trainer.everything, 4)
    trainer.saver.resume()
    trainer.saver.resume()
    trainer.drained()
    assert set(trainer.stored()[0]) == {4}
    trainer.close()


def test_a_kill_right_after_the_claim(
    trainer: Trainer, folder: Path, arena_dir: Path, tmp_path: Path
) -> None:
    """The arena of a dead process is reconciled by the first daemon that opens it, whichever that is."""
    trainer.save_durably(1, sealed=True)
    trainer.saver.stop()
    trainer.save(trainer.everything, 2)
    kill(folder)
    trainer.saver._closing = True
    trainer.saver.abandon()
    trainer.arena.close()
    done = DaemonSaver._done

    def killed_before(self: DaemonSaver, op: str, **fields: object) -> dict[str, object]:
        if op == "open":
            kill(folder)
        return done(self, op, **fields)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DaemonSaver, "_done", killed_before)
        again = Trainer(tmp_path / "store", arena_dir)
    again.drained()
    assert set(again.stored()[0]) == {2}
    assert (again.arena.version == again.arena.durable).all()
    again.close()
    assert_sound(tmp_path / "store")


def test_a_daemon_that_hangs_holds_up_nobody(
    folder: Path,
    arena_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Only who has to wait: a session that begins, which says what it waits for."""
    monkeypatch.setattr(saver, "_MARGIN", 0.3)
    monkeypatch.setattr(client, "_ANSWER_SECONDS", 0.3)
    others: list[Trainer] = []
    starting = threading.Thread(target=lambda: others.append(Trainer(tmp_path / "other", arena_dir)))
    trainer = Trainer(tmp_path / "store", arena_dir)
    trainer.save_durably(1)
    pid = kill(folder, signal.SIGSTOP)
    try:
        slowest = 0.0
        for step in range(2, 1000):
            trainer.copy(trainer.everything[:1], step)
            started = time.monotonic()
            trainer.saver.notify()
            slowest = max(slowest, time.monotonic() - started)
        assert slowest < 5.0, "training waits for nobody"
        started = time.monotonic()
        assert not trainer.saver.drain(0.2)
        assert trainer.saver.fault().kind == "daemon-gone"
        assert f"process {pid}, has not answered" in trainer.saver.fault().message
        assert time.monotonic() - started < 30
        starting.start()
        wait_until(lambda: f"the daemon, process {pid}, has not answered for 0.3 s" in caplog.text)
    finally:
        os.kill(pid, signal.SIGCONT)
    starting.join()
    others[0].close()
    trainer.save_durably(1000)
    assert daemon_of(folder) == pid
    assert set(trainer.stored()[0]) == {1000}
    trainer.close()


def test_what_nobody_told_of_is_found(trainer: Trainer) -> None:
    trainer.saver.notify = lambda: None  # type: ignore[method-assign]
    trainer.save(trainer.everything, 1)
    wait_until(lambda: not trainer.arena.pending().any())
    trainer.close()


def test_a_forked_child_has_nothing_to_do_with_it(trainer: Trainer) -> None:
    trainer.save(trainer.everything, 1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            trainer.saver.notify()
            assert not trainer.saver.drain(0.1)
            assert not any(
                os.path.realpath(f"/proc/self/fd/{fd}").startswith("socket:") for fd in range(3, 30)
            )
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    trainer.save(trainer.everything, 2)
    trainer.close()
    assert set(trainer.stored()[0]) == {2}


@pytest.mark.leaves_arena
def test_a_store_that_another_process_saved_to_meanwhile_is_left_alone(
    trainer: Trainer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a daemon the store is free: another host's session takes it and ends before this session is back."""
    trainer.save_durably(1, sealed=True)
    start = client.start

    def not_here(place: Path, variables: Mapping[str, str] | None = None) -> None:
        if place == folder:
            raise Unavailable("not yet", kind="daemon-not-started")
        start(place, variables)

    with monkeypatch.context() as patch:
        patch.setattr(client, "start", not_here)
        kill(folder)
        wait_until(lambda: trainer.saver._control is None)
        (tmp_path / "other").mkdir()
        other = Trainer(tmp_path / "store", tmp_path / "other")
        other.save(other.everything, 7, sealed=True)
        other.close()
        trainer.save(trainer.everything, 2)
    assert wait_until(lambda: trainer.saver.failure).kind == "fenced"
    assert not trainer.saver.drain(30)
    assert set(trainer.stored()[0]) == {7}
    trainer.close(durable=False)
    assert set(trainer.stored()[0]) == {7}
    assert_sound(tmp_path / "store")


def test_stopping_the_daemon_does_not_end_the_wait_for_the_store(
    trainer: Trainer, folder: Path, tmp_path: Path
) -> None:
    """The daemon has released the run while its connections are still open: the session continues with a new daemon."""
    trainer.save_durably(1)
    (tmp_path / "store" / "lanes").rename(tmp_path / "lanes")
    trainer.save(trainer.everything, 2)
    durable: list[bool] = []
    waiting = threading.Thread(target=lambda: durable.append(trainer.saver.drain(20)))
    waiting.start()
    wait_until(lambda: status(folder)["runs"][0]["errors"] > 0)  # type: ignore[index]
    stopped = client.ask(folder, "stop")["pid"]
    assert isinstance(stopped, int)
    # The store comes back before the new daemon has started: without shards it would be another line.
    wait_until(lambda: not exists(stopped))
    assert not durable
    (tmp_path / "lanes").rename(tmp_path / "store" / "lanes")
    waiting.join()
    assert durable == [True], trainer.saver.fault()
    assert set(trainer.stored()[0]) == {2}
    trainer.close()


def test_closed_in_the_middle_of_a_new_start(
    trainer: Trainer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.save_durably(1)
    kill(folder)
    trainer.saver.close()
    assert trainer.saver._control is None
    assert trainer.saver._watch is None
    assert not trainer.saver._watcher.is_alive()
    trainer.arena.remove()
    wait_until(lambda: status(folder) is None)


def test_attempts_that_take_long_on_a_busy_host_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_INSIST_SECONDS", 0.0)  # each attempt takes longer
    outcomes = [client.gone(), client.gone(), None]

    def attempt() -> str:
        if (error := outcomes.pop(0)) is not None:
            raise error
        return "reached"

    assert client.insist(attempt) == "reached"


def test_a_connection_to_the_daemon_that_is_just_ending_is_no_trouble(
    folder: Path, arena_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a later attempt knows whether another one can be started."""
    monkeypatch.setattr(saver, "_TROUBLE", 0.0)
    trainer = Trainer(tmp_path / "store", arena_dir)
    trainer.save_durably(1)
    connect, troubles = DaemonSaver._connect, list[ScarError | None]()

    def late(self: DaemonSaver) -> None:
        troubles.append(self.trouble)
        if len(troubles) == 1:
            raise client.gone()
        connect(self)

    monkeypatch.setattr(DaemonSaver, "_connect", late)
    kill(folder)
    wait_until(lambda: len(troubles) > 1)
    assert troubles[:2] == [None, None]
    trainer.save_durably(2)
    trainer.close()


def test_a_request_that_no_daemon_answers_says_why(
    folder: Path, arena_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "_TROUBLE", 0.0)
    monkeypatch.setattr(client, "_INSIST_SECONDS", 1.0)
    trainer = Trainer(tmp_path / "store", arena_dir)
    trainer.save_durably(1)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        kill(folder)
        with pytest.raises(Unavailable, match="could not be started") as caught:
            trainer.saver.stop()
        assert caught.value.kind == "daemon-not-started"
    trainer.saver.resume()
    trainer.save_durably(2)
    trainer.close()


class TestWithoutADaemon:
    def test_a_question_finds_none(self, arena_dir: Path) -> None:
        folder = host_folder(str(arena_dir))
        for make in (lambda: None, lambda: folder.mkdir(mode=0o700)):
            make()
            with pytest.raises(Unavailable) as caught:
                client.ask(folder, "status")
            assert caught.value.kind == "no-daemon"
            assert caught.value.exit_code == 17

    def test_one_that_cannot_start_says_why(self, arena_dir: Path) -> None:
        folder = host_folder(str(arena_dir))
        folder.mkdir(mode=0o755)
        with pytest.raises(ScarError, match="0700"):
            client.connect(folder)
        with pytest.raises(Unavailable, match="0700") as caught:
            client.start(folder)
        assert caught.value.kind == "daemon-not-started"
        folder.rmdir()

    def test_a_daemon_that_is_too_busy_is_asked_again(self, arena_dir: Path) -> None:
        folder = host_folder(str(arena_dir))
        folder.mkdir(mode=0o700)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / protocol.SOCKET))
            listener.listen(0)
            waiting = [client.connect(folder, begin=False)]
            with pytest.raises(BlockingIOError):
                waiting += [protocol.connect(folder, 5) for _ in range(5)]
            accepted = [listener.accept()[0]]
            waiting.append(client.connect(folder, begin=False))
            for connection in (*accepted, *waiting):
                connection.close()
        (folder / protocol.SOCKET).unlink()


class TestWaitingForTheStore:
    def test_without_a_daemon_or_a_run_there_is_nothing_to_wait_for(
        self, folder: Path, arena_dir: Path, tmp_path: Path
    ) -> None:
        client.wait_until_released(folder, "0" * 32)
        trainer = Trainer(tmp_path / "store", arena_dir)
        client.wait_until_released(folder, "0" * 32)
        trainer.close()

    def test_a_live_run_is_named(self, trainer: Trainer, folder: Path) -> None:
        with pytest.raises(Contention, match=f"process {os.getpid()} is saving"):
            client.wait_until_released(folder, trainer.store.run_id)
        trainer.close()

    def test_what_a_dead_run_left_is_saved_first(
        self, trainer: Trainer, folder: Path, arena_dir: Path, tmp_path: Path
    ) -> None:
        trainer.saver.stop()
        trainer.save(trainer.everything, 3)
        trainer.die()
        client.wait_until_released(folder, trainer.store.run_id)
        assert set(trainer.stored()[0]) == {3}
        store = Store.open(str(tmp_path / "store"))
        store.lock()
        store.close()
        again = Trainer(tmp_path / "store", arena_dir)
        again.close()

    def test_a_store_that_takes_nothing(
        self, trainer: Trainer, folder: Path, arena_dir: Path, tmp_path: Path
    ) -> None:
        trainer.save_durably(1)
        (tmp_path / "store" / "lanes").rename(tmp_path / "lanes")
        trainer.save(trainer.everything, 2)
        wait_until(lambda: status(folder)["runs"][0]["errors"] > 0)  # type: ignore[index]
        trainer.die()
        with pytest.raises(
            Contention,
            match=r"still saving the copies of process .*, which has ended: .*the store is missing",
        ):
            client.wait_until_released(folder, trainer.store.run_id, seconds=0.2)
        (tmp_path / "lanes").rename(tmp_path / "store" / "lanes")
        client.wait_until_released(folder, trainer.store.run_id)
        assert set(trainer.stored()[0]) == {2}
        again = Trainer(tmp_path / "store", arena_dir)
        again.close()
