"""Test the state that is flushed on an exception, a call, or the end of the program."""

from __future__ import annotations

import os
import textwrap
import threading
from pathlib import Path

import pytest
import torch

from scarctl.errors import UsageError
from tests.session.flushed import STEPS, assert_goes_on_exactly, half_an_iteration, trained
from tests.support.forkserver import Program
from tests.support.training import Loop

pytestmark = pytest.mark.usefixtures("one_thread")


def test_an_exception_in_the_loop(
    tmp_path: Path, both_savers: str, expected: dict[str, torch.Tensor]
) -> None:
    loop = trained(tmp_path / "store")
    with pytest.raises(RuntimeError, match="broken batch"), loop.session:
        raise RuntimeError("broken batch")
    # The daemon has the remaining work, and the arena stays; without a daemon the session has waited for the
    # store.
    assert_goes_on_exactly(tmp_path / "store", expected, "memory" if both_savers == "daemon" else "store")


def test_a_program_that_just_ends(tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    ends = {"raise RuntimeError('broken batch')": 1, "sys.exit(3)": 3, "": 0}
    running = []
    for number, end in enumerate(ends):
        program = f"""
            import sys, torch
            from pathlib import Path
            from tests.session.flushed import trained
            torch.set_num_threads(1)
            loop = trained(Path({str(tmp_path / str(number))!r}))
            {end}
        """
        running.append(Program(["-c", textwrap.dedent(program)]))
    assert [process.wait(60) for process in running] == list(ends.values())
    for number in range(len(ends)):
        assert_goes_on_exactly(tmp_path / str(number), expected, tier=None)


def test_by_hand(tmp_path: Path, both_savers: str, expected: dict[str, torch.Tensor]) -> None:
    loop = Loop(tmp_path / "store")
    with pytest.raises(UsageError, match="before the first step"):
        loop.session.flush()
    loop.train(STEPS)
    half_an_iteration(loop)
    assert loop.session.flush()
    # In memory and queued: a process that dies here has lost nothing.
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    from_thread: list[bool] = []
    thread = threading.Thread(target=lambda: from_thread.append(loop.session.flush()))
    thread.start()
    thread.join()
    assert from_thread == [True]
    loop.session.close(seal=False)
    assert_goes_on_exactly(tmp_path / "store", expected, tier=None)


def test_values_that_are_not_finite_are_not_flushed(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "store", interval=100)
    loop.train(3)
    with torch.no_grad():
        loop.model.out.weight[:] = float("nan")
    assert not loop.session.flush()
    loop.session.recover("out.weight")
    assert torch.isfinite(loop.model.out.weight).all()
    assert loop.session.flush()
    loop.session.close()
