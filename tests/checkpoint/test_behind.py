"""Test the warning about a store that is behind, with its remedy, and the lines at attach, resume and close."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import scarctl
from scarctl import Session
from scarctl.arena.queue import HandOver
from scarctl.checkpoint import behind
from scarctl.checkpoint.behind import KIND
from scarctl.cli.inspect_view import summary
from scarctl.config import grouped
from scarctl.ops.survey import survey
from scarctl.persist.persister import Persister
from scarctl.store import Store
from tests.support.log_per_shard import store_with_a_log_per_shard


class Loop:
    """A small model, trained as fast as possible."""

    def __init__(self, folder: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(32, 32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.session: Session = scarctl.attach(
            self.model,
            self.optimizer,
            store=folder / "run",
            **grouped(**{"daemon": False, "shards": 4} | options),
        )
        self.resumed = self.session.resume()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 32)).square().sum().backward()
        self.optimizer.step()


def _behind(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "behind" in r.getMessage()
    ]


@pytest.mark.long
def test_a_store_that_falls_behind_is_said_with_reason_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, slow = os.fsync, [0.1]

    def fsync(fd: int) -> None:
        time.sleep(slow[0])  # a disk whose writes take the same time for any number of bytes
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    store_with_a_log_per_shard(tmp_path / "run", shards=4, partition_bytes=256).close()
    loop = Loop(tmp_path, interval=1, fraction=0.25, partition_bytes=256)
    for _ in range(4):  # the store keeps up, so that checkpoints of a part are measured
        loop.step()
        assert loop.session._engine is not None
        assert loop.session._engine.saver.drain(60)
    deadline = time.monotonic() + 90
    while not any("Most of that time goes into commits" in text for text in _behind(caplog)):
        loop.step()
        assert time.monotonic() < deadline, _behind(caplog)
    said = _behind(caplog)
    lags = [int(text.split("store is ")[1].split()[0]) for text in said]
    assert lags[0] > 2 * 4
    assert all(after >= 2 * before for before, after in itertools.pairwise(lags))
    assert "a larger fraction, or a new store: here each checkpoint is 4 commits" in said[-1]
    assert "interval=" in said[-1]
    [caveat] = loop.session.caveats
    assert (caveat.kind, caveat.inexact) == (KIND, False)
    slow[0] = 0.0
    loop.session.checkpoint(full=True, wait=True)
    assert any(
        line.startswith("caution: ") and "behind" in line
        for line in summary(survey(Store.open(tmp_path / "run"), None))
    )
    while list(loop.session.caveats):
        loop.step()
        assert loop.session._engine is not None
        assert loop.session._engine.saver.drain(20)
        assert time.monotonic() < deadline + 60
    loop.session.close()
    again = Loop(tmp_path)
    assert again.resumed.exact
    again.session.close()


def test_a_store_that_keeps_up_is_not_mentioned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(tmp_path, interval=10, fraction=0.25)
    for _ in range(40):
        loop.step()
        assert loop.session._engine is not None
        assert loop.session._engine.saver.drain(20)
    assert _behind(caplog) == []
    loop.session.close()


def test_a_saver_that_has_only_begun_is_no_store_that_falls_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first hand-over takes its time, as when a daemon starts on a busy host, and iterations take milliseconds."""
    persist, begins = Persister.persist, threading.Event()

    def late(persister: Persister, handover: HandOver) -> int:
        assert begins.wait(60)
        return persist(persister, handover)

    monkeypatch.setattr(Persister, "persist", late)
    loop = Loop(tmp_path, interval=1, fraction=0.25, partition_bytes=256)
    for _ in range(40):
        loop.step()
    assert _behind(caplog) == []
    monkeypatch.setattr(behind, "_STARTING", 0.0)
    for _ in range(40):
        loop.step()
    assert "Nothing was measured yet" in _behind(caplog)[0]
    begins.set()
    loop.session.close()


def test_a_resume_that_is_not_exact_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A loop that does not print it, or whose framework resumes, would begin with a mix of steps in silence."""
    loop = Loop(tmp_path, interval=100, fraction=0.25, partition_bytes=256)
    for _ in range(3):
        loop.step()
        # Otherwise the first state may not be durable yet, and then the next checkpoint saves the whole state again.
        assert loop.session._engine is not None
        assert loop.session._engine.saver.drain(20)
    loop.session.checkpoint()
    loop.session.close(seal=False)
    caplog.clear()
    loop = Loop(tmp_path)
    (said,) = [record for record in caplog.records if "resumed" in record.getMessage()]
    assert said.levelname == "WARNING"
    assert said.getMessage() == f"resumed {tmp_path / 'run'} at {loop.resumed}"
    assert "not exact: partitions are of several steps" in said.getMessage()
    loop.session.close()


def test_the_daemon_says_how_fast_it_is(tmp_path: Path, arena_dir: Path) -> None:
    loop = Loop(tmp_path, interval=1, daemon=True, arena_dir=arena_dir)
    deadline = time.monotonic() + 60
    while loop.session._saver.speed is None:
        loop.step()
        assert time.monotonic() < deadline
        assert loop.session._engine is not None
        loop.session._engine.saver.drain(5)
    assert loop.session._saver.speed.commits_per_second > 0
    loop.session.close()


def test_one_line_each_at_attach_resume_and_close(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="scarctl")
    url = str(tmp_path / "run")

    def lines() -> list[str]:
        found = [r.getMessage() for r in caplog.records if r.name == "scarctl" and r.levelno == logging.INFO]
        caplog.clear()
        return found

    loop = Loop(tmp_path, interval=7, fraction=0.5)
    attached, resumed = lines()
    assert attached == (
        f"attached to {url}: interval 7, fraction 0.5, 4 shards, saved by a thread of this process"
    )
    assert resumed == f"{url} holds no state: a new run begins"
    for _ in range(3):
        loop.step()
    loop.session.close()
    assert lines() == [f"closed {url}: step 3, sealed, all of it durable"]
    assert str(loop.session.resumed) == "step 0: the store holds no state, a new run begins"
    loop = Loop(tmp_path)
    _, resumed = lines()
    assert resumed == f"resumed {url} at {loop.session.resumed}"
    assert repr(loop.session.resumed) == f"<Resumed: {loop.session.resumed}>"
    assert resumed.startswith(f"resumed {url} at step 3, exact; oldest copy of step 3; ")
    assert "partitions from store; saved 20" in resumed
    loop.session.close(seal=False)
    [closed] = lines()
    assert closed.startswith(f"closed {url}: step 3, sealed")


@pytest.mark.parametrize(("encoding", "turn"), [("exact", 80), ("bfloat16", 40), ("int8", 23)])
def test_a_turn_is_shorter_where_copies_take_fewer_bytes(tmp_path: Path, encoding: str, turn: int) -> None:
    """A checkpoint's budget is one of stored bytes: with half of them each, twice as many copies fit into it."""
    loop = Loop(tmp_path, interval=10, fraction=1 / 8, encoding=encoding)
    loop.step()
    engine = loop.session._engine
    assert engine is not None
    assert turn <= engine._behind.turn <= turn + 3
    loop.session.close()
