"""Test that memory without room in mid-run costs no older copy, and is said; saving goes on once there is room."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from scarctl.arena.queue import HandOverQueue
from scarctl.errors import Unavailable
from tests.support.training import Loop, differing


def test_older_copies_stay_while_memory_is_full_and_saving_goes_on_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise Unavailable("no room", hint="set another arena_dir, or free some space", kind="arena-full")

    (tmp_path / "memory").mkdir()
    loop = Loop(tmp_path / "store", arena_dir=tmp_path / "memory", interval=1, fraction=1.0, daemon=False)
    loop.train(4, settle=True)
    loop.session.checkpoint(full=True, wait=True)
    good = loop.state()
    with monkeypatch.context() as patch:
        patch.setattr(HandOverQueue, "_write", full)
        loop.train(3)
        loop.session._saving.finish()
        assert loop.session.stats.errors > 0
        assert "set another arena_dir" in caplog.text
    loop.session.recover("all", before=4)  # the store has lost nothing
    assert differing(loop.state(), good) == []
    caplog.clear()
    loop.train(2, settle=True)
    loop.session.close()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    again = Loop(tmp_path / "store", arena_dir=tmp_path / "memory", seed=3, daemon=False)
    assert again.session.resume().step == 9
    assert differing(again.state(), loop.state()) == []
    again.session.close()
