"""Test a daemon that replaces another: it saves to the store, even if it cannot keep copies on other hosts."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

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
