"""Test what a checkpoint does where memory has no room for the rows that the store is to get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scarctl.checkpoint import engine as module
from scarctl.errors import Unavailable
from tests.support.training import Loop, differing


def test_without_room_the_store_reads_memory_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> Any:
        raise Unavailable("no space left", kind="arena-full")

    monkeypatch.setattr(module, "copy_out", full)
    loop = Loop(tmp_path / "store", interval=1, on_error="raise")
    loop.train(6, settle=True)
    assert caplog.text.count("no space left. Until there is room") == 1
    loop.session.close()
    again = Loop(tmp_path / "store", seed=1)
    resumed = again.session.resume()
    assert (resumed.step, resumed.consistent) == (6, True)
    assert differing(loop.state(), again.state()) == []
    again.session.close()
