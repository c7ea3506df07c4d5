"""Test what a checkpoint does to memory: all of it as of one step, or nothing."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import scarctl
from scarctl.checkpoint import engine as module
from scarctl.state.version import step_of
from tests.support.training import drained


def session(folder: Path, state: dict[str, np.ndarray], **options: object) -> scarctl.Session:
    settings = scarctl.Settings(daemon=False)
    return scarctl.attach(state, store=folder, interval=1, settings=settings, **options)  # type: ignore[arg-type]


def test_values_that_are_not_finite_leave_memory_and_the_store_as_they_were(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"x": np.zeros((8, 4)), "y": np.zeros(3)}
    with session(tmp_path / "store", state) as made:
        for _ in range(3):
            state["x"] += 1
            made.step()
        made._saving.finish()
        arena = made._started().arena
        state["y"][1] = np.nan
        for _ in range(3):
            state["x"] += 1
            made.step()
        made._saving.finish()
        assert step_of(arena.slot.head) == 3
        assert caplog.text.count("memory and the store keep the state before") == 1
        state["y"][1] = 0.5
        made.step()
        made._saving.finish()
        assert step_of(arena.slot.head) == 7
        assert arena.whole
        drained([made])
    again = {"x": np.ones((8, 4)), "y": np.ones(3)}
    with session(tmp_path / "store", again) as other:
        assert other.resume().consistent
        assert (again["x"] == 6).all()
        assert again["y"].tolist() == [0, 0.5, 0]


def test_a_checkpoint_is_left_out_while_its_slot_is_read(tmp_path: Path) -> None:
    state = {"x": np.zeros((8, 4))}
    with session(tmp_path / "store", state) as made:
        for _ in range(2):
            state["x"] += 1
            made.step()
        made._saving.finish()
        arena = made._started().arena
        drained([made])
        with arena.held(60) as hold:
            for _ in range(4):
                state["x"] += 1
                made.step()
            made._saving.finish()
            assert hold.lasts()
            assert step_of(arena.slot.head) == 3, "the other slot was free once"
            assert not made.flush(0.02), "it waits for the reader"
            assert hold.lasts()
            assert made._saving.flush(1.0, leaving=True), "it ends the hold"
            assert not hold.lasts()
        assert step_of(arena.slot.head) == 6


def test_large_extras_are_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LARGE", 100)
    state = {"x": np.zeros((8, 4))}
    with session(tmp_path / "store", state) as made:
        for _ in range(3):
            state["x"] += 1
            made.step()
    assert caplog.text.count("Training waits while they are written") == 1


def test_a_part_that_is_marked_while_extras_are_written_does_not_get_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread says that it is lost: the values were copied already."""
    state = {"x": np.zeros((8, 4))}
    write = module.write_extras
    with session(tmp_path / "store", state) as made:
        made.step()
        made._saving.finish()
        arena = made._started().arena

        def mark(*arguments: Any) -> int:
            made.mark_lost("x")
            return write(*arguments)

        monkeypatch.setattr(module, "write_extras", mark)
        state["x"] += 1
        made.step()
        made._saving.finish()
        monkeypatch.undo()
        assert step_of(arena.slot.head) == 1
        assert made.stats.checkpoints == 1
        state["x"][:] = 7
        made.recover()
        assert (state["x"] == 0).all()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_copy_that_fails_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """In the second half: the rows of a table that were marked as touched stay marked."""
    table = torch.nn.Embedding(4000, 8, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    settings = scarctl.Settings(daemon=False)
    rows = scarctl.Partitioning(rows={"weight": 1})
    made = scarctl.attach(
        table, optimizer, store=tmp_path / "store", interval=1, settings=settings, partitioning=rows
    )
    made.resume()

    def train(step: int) -> None:
        table(torch.arange(10 * step, 10 * step + 10)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for step in range(3):
        train(step)
    made._saving.finish()
    checkpoints = made._saving._checkpoints

    def fail(*arguments: Any) -> Any:
        monkeypatch.undo()
        raise error

    monkeypatch.setattr(checkpoints, "_copy_again", fail)
    train(3)
    with contextlib.suppress(KeyboardInterrupt):
        made._saving.finish()
    for step in range(4, 7):
        train(step)
    made._saving.finish()
    slot = made._started().arena.slot
    assert slot.whole
    assert step_of(slot.head) == 7
    assert np.array_equal(slot.rows(0, 0).view(np.float32), table.weight.detach().numpy())
    made.close()
