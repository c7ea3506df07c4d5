"""Test that no rank begins if one cannot begin to save."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

import scarctl
import scarctl.persist.saver
from scarctl.config import grouped
from scarctl.persist.thread import PersisterThread
from tests.distributed.jobs import Bowl
from tests.distributed.launch import launch


class Starved(PersisterThread):
    """A thread that cannot start, as without memory for another stack."""

    def __init__(self, *args: Any) -> None:
        size = threading.stack_size(1 << 46)
        try:
            super().__init__(*args)
        finally:
            threading.stack_size(size)


def descend(rank: int, world: int, folder: str) -> None:
    """Train three steps of the model of `starved`."""
    model = Bowl()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    Path(folder, "arena").mkdir(exist_ok=True)
    options = grouped(interval=2, daemon=False, arena_dir=f"{folder}/arena")
    with scarctl.attach(model, optimizer, store=f"{folder}/store", **options) as session:
        session.resume()
        for _ in range(3):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()


def starved(rank: int, world: int, folder: str) -> str:
    """Return what each rank's first step, or a call before it, raises if the last rank's saving thread cannot start."""
    model = Bowl()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    Path(folder, "arena").mkdir(exist_ok=True)
    options = grouped(interval=1000, daemon=False, arena_dir=f"{folder}/arena")
    session = scarctl.attach(model, optimizer, store=f"{folder}/store", **options)
    if rank == world - 1:
        scarctl.persist.saver.PersisterThread = Starved  # type: ignore[misc]
    try:
        session.resume()
        model().backward()
        optimizer.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        session.close(seal=False)
    return ""


def test_what_keeps_one_rank_from_saving_is_raised_on_all(tmp_path: Path) -> None:
    launch("tests.distributed.test_first_step:descend", 1, str(tmp_path))
    found = launch("tests.distributed.test_first_step:starved", 2, str(tmp_path))
    reason = "RuntimeError: can't start new thread"
    assert found == [f"ScarError: rank 1: {reason}", reason]
