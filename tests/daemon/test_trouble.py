"""Test that a session reports once that a store cannot be written, and once that it can again."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from scarctl.daemon.server import Daemon
from scarctl.daemon.trouble import Trouble
from scarctl.errors import AccessDenied, Unavailable
from scarctl.persist.persister import Persister
from tests.daemon.trainer import Trainer, status
from tests.support.waiting import wait_until


def test_a_store_that_cannot_be_written_and_its_return_are_reported(
    daemon: Daemon, trainer: Trainer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.save_durably(1)

    def full(*args: Any) -> int:
        raise Unavailable("cannot write: No space left on device")

    with caplog.at_level(logging.INFO, "scarctl"):
        with monkeypatch.context() as patch:
            patch.setattr(Persister, "persist", full)
            trainer.save(trainer.everything, 2)
            (said,) = wait_until(lambda: [one for one in caplog.messages if "copies wait" in one])
            wait_until(lambda: status(daemon.folder)["runs"][0]["errors"] >= 3)  # type: ignore[index]
        trainer.drained()
        wait_until(lambda: "the store can be written again" in caplog.messages)
    assert said.startswith("saving fails, and is retried")
    assert "No space left on device" in said
    assert [one for one in caplog.messages if "copies wait" in one] == [said]
    trainer.close()


def test_a_pause_is_not_the_stores_return(
    daemon: Daemon, trainer: Trainer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused, end = threading.Event(), threading.Event()

    def full(*args: Any) -> int:
        if paused.is_set():
            end.wait(20)
        raise Unavailable("cannot write: No space left on device")

    run = daemon.runs.known(trainer.store.run_id)
    assert run is not None
    with caplog.at_level(logging.INFO, "scarctl"), monkeypatch.context() as patch:
        patch.setattr(Persister, "persist", full)
        trainer.save(trainer.everything, 1)
        wait_until(lambda: [one for one in caplog.messages if "copies wait" in one])
        trainer.saver.stop()
        paused.set()
        trainer.saver.resume()
        for mark in ("first", "second"):  # reports after the first fault came before the second
            run.events.put({"warn": mark})
            wait_until(lambda mark=mark: mark in caplog.messages)  # type: ignore[misc]
        assert "the store can be written again" not in caplog.messages
        end.set()
    trainer.drained()
    trainer.close()


def test_a_store_that_fails_now_and_then_is_reported_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("scarctl.daemon.trouble.time.monotonic", lambda: now)
    trouble = Trouble()
    assert trouble.look(None) is None
    for seconds, warned in ((0, True), (10, False), (49, False), (61, True)):
        now = 100.0 + seconds
        # Each attempt names another file.
        found = [trouble.look(Unavailable(f"cannot write {n}: disk full")) for n in range(3)]
        assert [one is not None for one in found] == [warned, False, False]
        assert (trouble.look(None) is not None) == warned  # the recovery of what was reported
    now += 1
    assert trouble.look(Unavailable("disk full")) is None
    now += 60
    assert "disk full" in (trouble.look(Unavailable("disk full")) or {})["warn"]
    now += 60
    assert "denied" in (trouble.look(AccessDenied("denied")) or {})["warn"]
