"""Test the warning about a store that is behind, with its remedy, and the lines at attach, resume and close."""

from __future__ import annotations

import logging
import re
import shutil
import time
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import scarctl
from scarctl import Session
from scarctl.checkpoint import behind
from scarctl.checkpoint.behind import KIND, Behind
from scarctl.config import grouped
from scarctl.policy.turns import Turns
from scarctl.state.caveats import Caveats
from tests.support.training import drained

TURN = 100


class Store:
    """A store that is behind by as much as the test says; an iteration takes a second."""

    def __init__(self, *, fixed: int | None = 10, seconds: float | None = 5.0) -> None:
        """seconds: that it takes for a part of 10 MB; None: unknown."""
        self.turns = Turns(state_bytes=80_000_000, part_bytes=10_000_000, max_lag=30.0)
        self.turns.bandwidth = None if seconds is None else 10e6 / seconds
        self.caveats = Caveats()
        self.behind = Behind(self.caveats, fixed=fixed)

    def look(self, step: int, lag: int) -> str | None:
        """Return the caveat after a look."""
        self.behind.look(step, lag, TURN, self.turns, 1.0)
        return next((caveat.message for caveat in self.caveats if caveat.kind == KIND), None)


def test_a_lag_of_more_than_two_turns_is_said_whenever_it_has_doubled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Store()
    for step in range(0, 1000, 10):
        store.look(step, step)
    said = [record.getMessage().split(":")[0] for record in caplog.records]
    assert said == ["step 210", "step 420", "step 840"]
    assert "the store is 840 iterations behind" in str(store.look(1000, 150))
    assert store.look(1010, TURN) is None, "it has caught up"
    assert store.look(1100, 300) is None, "and falls behind again soon"
    assert store.look(9000, 0) is None
    assert "step 9500" in str(store.look(9500, 300)), "after a long time without a lag it is news"


@pytest.mark.parametrize(
    ("seconds", "fixed", "remedy"),
    [
        (5.0, 10, '2 MB/s, and 5 s for a part. Set interval=11 or more, or interval="auto".'),
        (40.0, 10, "Set interval=50 or more"),
        (5.0, None, "Use a faster store, or peers."),
    ],
)
def test_the_reason_and_what_to_do(seconds: float, fixed: int | None, remedy: str) -> None:
    assert remedy in str(Store(fixed=fixed, seconds=seconds).look(1000, 300))


def test_a_saver_that_has_only_begun_is_no_store_that_falls_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(seconds=None)
    monkeypatch.setattr(behind, "_STARTING", 1000.0)
    assert store.look(900, 900) is None
    assert "Nothing was measured yet" in str(store.look(1100, 1100))


def test_a_store_that_stands_still_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if iterations are so long that the lag is small."""
    now, store = [0.0], Store()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for step in range(100, 110):
        store.look(step, step - 100 + 1)
        now[0] += 20
    assert [record.getMessage()[:48] for record in caplog.records] == [
        "copies of step 99 have waited for the store for "
    ]


class Loop:
    """A small model, trained as fast as possible."""

    def __init__(self, folder: Path, *, mode: Literal["auto", "partial"] = "auto", **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(32, 32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.session: Session = scarctl.attach(
            self.model,
            self.optimizer,
            store=folder / "run",
            **grouped(**{"daemon": False, "shards": 4} | options),
        )
        self.resumed = self.session.resume(mode)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 32)).square().sum().backward()
        self.optimizer.step()


def test_a_resume_that_is_not_exact_is_a_warning(
    tmp_path: Path, arena_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A loop that does not print it, or whose framework resumes, would begin with a mix of steps in silence."""
    loop = Loop(tmp_path, interval=100, fraction=0.25, partition_bytes=256)
    loop.step()
    loop.session._saving.finish()
    drained([loop.session])
    loop.step()
    loop.session.checkpoint()
    loop.session.close(seal=False)
    for place in arena_dir.iterdir():
        shutil.rmtree(place)  # the host has failed: the store has only a part of the last step
    caplog.clear()
    loop = Loop(tmp_path, mode="partial")
    (said,) = [record for record in caplog.records if "resumed" in record.getMessage()]
    assert said.levelname == "WARNING"
    assert said.getMessage() == f"resumed {tmp_path / 'run'} at {loop.resumed}"
    assert "mixed, partitions of steps" in said.getMessage()
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
    assert resumed.startswith(
        f"resumed {url} at step 3, consistent; the position in the data is unknown; 5 partitions from store; the store "
        "has step 3, of "
    )
    assert re.search(r"of one step, 0 iterations and [\d.]+ s old$", resumed)
    loop.session.close(seal=False)
    [closed] = lines()
    assert closed.startswith(f"closed {url}: step 3, sealed")
