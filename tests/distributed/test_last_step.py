"""Test that ranks which get a signal at different moments save the same step."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import scarctl
from tests.distributed.launch import launch

FIRST = 3
STEPS = FIRST + 1


def a_step_apart(rank: int, world: int, store: str) -> tuple[int | None, int]:
    """Return the step that the signal's flush has saved, and that of the loop's end."""
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with scarctl.attach(model, optimizer, store=store, settings=scarctl.Settings(daemon=False)) as session:
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            if step == FIRST + rank:
                os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 30.0
        while not came and time.monotonic() < deadline:
            time.sleep(0.01)
        return session._saving.flushed, session.head_step


def test_a_rank_that_got_the_signal_a_step_earlier_makes_that_step(tmp_path: Path) -> None:
    results = launch("tests.distributed.test_last_step:a_step_apart", 2, str(tmp_path / "store"))
    assert results == [[STEPS, STEPS]] * 2
