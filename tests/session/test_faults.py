"""Test faults while a session saves: no copy is forgotten, and the fault is reported where it matters."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import scarctl
from scarctl.arena import extras
from scarctl.checkpoint.copied import Copied
from scarctl.checkpoint.engine import Engine
from scarctl.checkpoint.live_state import LiveState
from scarctl.errors import ScarError, Unavailable
from scarctl.policy.turns import Turn
from scarctl.session import opening
from scarctl.session.ending import LastState
from scarctl.store.backends.remote_errors import Patience
from tests.session.test_evacuate import throttle
from tests.support.elsewhere import elsewhere
from tests.support.process import Forked, Tell
from tests.support.training import Loop, differing, drained
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("warm_torch")


@contextmanager
def full_memory() -> Iterator[None]:
    """Make checkpoints fail for lack of space."""

    def full(path: str, flags: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extras, "private", full)
        yield


# -- the arena's folder ------------------------------------------------------------------------------------------


def test_who_waits_for_a_checkpoint_hears_that_it_failed(tmp_path: Path, both_savers: str) -> None:
    loop = Loop(tmp_path / "store", interval=100)
    loop.train(2)
    loop.session.checkpoint(full=True, wait=True)
    loop.train(1)
    with full_memory():
        with pytest.raises(Unavailable, match="No space left"):
            loop.session.checkpoint(full=True, wait=True)
        assert elsewhere(tmp_path / "store")[0].step == 2
        loop.session.checkpoint(full=True)  # a call that does not wait is not delayed
    loop.session.checkpoint(full=True, wait=True)
    resumed, state = elsewhere(tmp_path / "store")
    assert (resumed.step, resumed.consistent) == (3, True)
    assert differing(state, loop.state()) == []
    loop.session.close()


def test_an_arena_that_was_deleted_is_no_durable_checkpoint(tmp_path: Path, both_savers: str) -> None:
    loop = Loop(tmp_path / "store", interval=100, timeout=2)
    loop.train(2)
    loop.session.checkpoint(full=True)
    drained([loop.session])
    assert loop.session._engine is not None
    shutil.rmtree(loop.session._engine.arena.folder)
    loop.train(1)
    with pytest.raises(ScarError):
        loop.session.checkpoint(full=True, wait=True)
    loop.session.close()
    assert loop.session.stats.errors > 0


def test_a_close_that_waits_says_for_what_and_how_long(
    tmp_path: Path, both_savers: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The store is away when the session closes, and comes back once the warning is there."""
    monkeypatch.setattr(opening, "_SILENT", 0.2)
    loop = Loop(tmp_path / "store", interval=100, timeout=30)
    loop.train(2)
    loop.session.checkpoint(full=True, wait=True)
    loop.train(1)
    (tmp_path / "store").rename(tmp_path / "away")

    assert loop.session._engine is not None
    arena = loop.session._engine.arena
    failed = []

    def put_back() -> None:
        wait_until(lambda: "waits up to" in caplog.text)
        failed.append(arena.failed_saves)
        (tmp_path / "away").rename(tmp_path / "store")

    helper = threading.Thread(target=put_back)
    helper.start()
    loop.session.close()
    helper.join()
    assert failed[0] > 0, "whichever process saves counts them where `inspect` reads them"
    (said,) = [record for record in caplog.records if "waits up to" in record.getMessage()]
    text = said.getMessage()
    assert said.levelname == "WARNING"
    assert re.search(
        r"up to (29|30) s more for the store, which lacks \d+ partitions? \(\d.* [KM]?i?B\): ", text
    )
    assert "safe in this host's memory" in text
    assert ("the daemon, or the next session" in text) == (both_savers == "daemon")
    assert "not everything is durable" not in caplog.text
    assert elsewhere(tmp_path / "store")[0].step == 3


def test_a_store_that_is_only_slow_at_the_end_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(opening, "_SILENT", 0.2)
    loop = Loop(tmp_path / "store", interval=100, timeout=30, daemon=False)
    loop.train(2)
    loop.session.checkpoint(full=True, wait=True)
    loop.train(1)
    stuck = throttle(loop.session, 1e12).stuck
    stuck.set()

    def go_on() -> None:
        wait_until(lambda: "waits up to" in caplog.text)
        stuck.clear()

    helper = threading.Thread(target=go_on)
    helper.start()
    loop.session.close()
    helper.join()
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert re.search(r"s more for the store, which lacks \d+ partitions \(\S+ \w+\)\. All is safe", said), (
        said
    )


def test_what_is_tried_again_draws_nothing_from_the_generator_of_training() -> None:
    """Pauses are of random length, and end in threads of the training process."""
    state = random.getstate()
    patience = Patience(60.0)
    assert all(patience.pause() for _ in range(3))
    assert random.getstate() == state


# -- copies ------------------------------------------------------------------------------------------------------


def test_ctrl_c_while_a_copy_is_made_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(tell: Tell) -> None:
        loop = Loop(tmp_path / "store", interval=1, flush_on_signal=False)
        loop.train(3, settle=True)
        copy = Engine.copy

        def slow(self: Engine, live: LiveState, step: int, turn: Turn, **options: bool) -> Copied:
            copied = copy(self, live, step, turn, **options)
            time.sleep(0.6)  # a large state
            return copied

        monkeypatch.setattr(Engine, "copy", slow)
        threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt), loop.session:
            loop.train(2)
        torch.save((loop.session.head_step, loop.state()), tmp_path / "state.pt")

    with Forked(body) as child:
        assert child.wait() == 0
    step, expected = torch.load(tmp_path / "state.pt")
    resumed, state = elsewhere(tmp_path / "store")
    assert (resumed.step, resumed.consistent) == (step, True)
    buffers = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert set(differing(state, expected)) <= buffers, "the next forward pass may have changed them"
    assert state["norm.num_batches_tracked"] == step


def test_closed_by_another_thread_what_is_sealed_is_of_one_step(
    tmp_path: Path, both_savers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attached() -> tuple[nn.Linear, torch.optim.Optimizer, scarctl.Session]:
        model = nn.Linear(16, 16)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return model, optimizer, scarctl.attach(model, optimizer, store=tmp_path / "store", interval=100)

    def train() -> None:
        while not ended.is_set():
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, -1.0)
            optimizer.step()  # every value is the number of its step
            time.sleep(0.002)

    model, optimizer, session = attached()
    ended, copy, last = threading.Event(), Engine.copy, LastState.save

    def slow(self: Engine, *arguments: Any, **options: Any) -> Copied:
        time.sleep(0.1)  # meanwhile training would take some fifty steps
        return copy(self, *arguments, **options)

    def slow_end(self: LastState, *arguments: Any, **options: Any) -> None:
        last(self, *arguments, **options)
        time.sleep(0.1)  # as many steps, which are not saved

    thread = threading.Thread(target=train)
    thread.start()
    wait_until(lambda: session.head_step > 20)
    monkeypatch.setattr(Engine, "copy", slow)
    monkeypatch.setattr(LastState, "save", slow_end)
    session.close()
    ended.set()
    thread.join()
    closed_at = session.head_step
    monkeypatch.undo()
    monkeypatch.setenv("SCARCTL_DAEMON", "0")
    model, optimizer, session = attached()
    resumed = session.resume()
    assert resumed.consistent
    assert {int(v) for p in model.parameters() for v in p.flatten()} == {resumed.step}
    assert resumed.step == closed_at
    session.close()
