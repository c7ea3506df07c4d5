"""Test a daemon that replaces another: it saves to the store, even if it cannot keep copies on other hosts."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

from scarctl.arena.folder import host_folder
from scarctl.daemon import lifecycle
from scarctl.daemon.server import Daemon
from tests.arena.test_stale import left
from tests.daemon.trainer import Trainer, status
from tests.support.certificates import Authority
from tests.support.waiting import wait_until

SECONDS = 30.0
"""Longest wait for a new daemon, on a busy machine."""


@pytest.mark.parametrize("follows", [True, False])
def test_saving_continues_without_a_certificate(
    folder: Path, arena_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, follows: bool
) -> None:
    authority = Authority(tmp_path)
    trainer = Trainer(tmp_path / "store", arena_dir)
    trainer.save_durably(1)
    trainer.saver.admit("11" * 16, "22" * 32, "127.0.0.1", authority.host("east"))
    if follows:
        trainer.saver.follow("east", [], 1, None)
    epoch = trainer.arena.epoch
    authority.host("east", days=-1)  # into the same files: the job's certificate has expired
    first = status(folder)
    assert first is not None
    os.kill(first["pid"], signal.SIGKILL)
    wait_until(lambda: "another one continues" in caplog.text, SECONDS)
    trainer.save(trainer.everything, 2)
    trainer.drained(SECONDS)
    assert set(trainer.stored()[0]) == {2}
    warned = [line for line in caplog.messages if "no longer keep copies" in line]
    assert len(warned) == 1
    assert "certificate has expired" in warned[0]
    assert trainer.saver.trouble is None
    assert trainer.arena.epoch == epoch + 1
    trainer.close()


def test_copies_are_asked_for_before_saving_continues(
    trainer: Trainer, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evacuation that was interrupted begins again as soon as saving does, and uses the links of that moment."""
    trainer.save_durably(1)
    trainer.saver.admit("11" * 16, "22" * 32, "127.0.0.1", None)
    trainer.saver.follow("east", [], 1, None)
    asked: list[str] = []
    ask = trainer.saver._ask
    monkeypatch.setattr(trainer.saver, "_ask", lambda op, **fields: (asked.append(op), ask(op, **fields))[1])
    first = status(folder)
    assert first is not None
    os.kill(first["pid"], signal.SIGKILL)
    wait_until(lambda: "another one continues" in caplog.text, SECONDS)
    assert asked[-4:] == ["open", "admit", "follow", "resume"]
    trainer.close()


@pytest.mark.parametrize("lasting", [True, False])
def test_a_daemon_stays_while_others_may_come_for_memory(
    arena_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lasting: bool
) -> None:
    """Without runs it would end. With a secret that was drawn for one start, no later one can come."""
    monkeypatch.setattr(lifecycle, "BETWEEN", 0.1)
    monkeypatch.setattr(lifecycle, "RETURN", 0.1)
    folder = host_folder(str(arena_dir))
    folder.mkdir(mode=0o700)
    daemon = Daemon(folder)
    answers: list[bool] = []
    wanted = daemon.host.wanted

    def noted() -> bool:
        answers.append(wanted())
        return answers[-1]

    monkeypatch.setattr(daemon.host, "wanted", noted)
    thread = threading.Thread(target=daemon.serve)
    thread.start()
    trainer = Trainer(tmp_path / "store", arena_dir)
    trainer.saver.admit("11" * 16, "22" * 32, "127.0.0.1", None, lasting=lasting)
    replica = left(arena_dir, f"{trainer.store.run_id}-7", pending=2)
    trainer.save_durably(1)
    trainer.close()
    if lasting:
        wait_until(lambda: len(answers) > 3)
        assert all(answers[:3])
        shutil.rmtree(replica)
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert answers[-1] is False
    shutil.rmtree(replica, ignore_errors=True)
