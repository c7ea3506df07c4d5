"""Test a host that is killed while it writes a replica: what is left is a state of the owner's arena."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from scarctl.arena import extras, kinship
from scarctl.arena.arena import Arena
from scarctl.arena.header import FILE
from scarctl.arena.slot import Slot
from scarctl.peers import replica as replicas
from scarctl.peers.replica import sweep
from tests.peers.test_replica import EVERYTHING, RUN, Run, equal


def half_of_the_rows(slot: Slot, ids: Any, data: Any, path: Any) -> None:
    """Copy only the first tensor, and die."""
    rows = slot.rows(0, 0)
    rows[: len(rows) // 2] = data[0]
    os.kill(os.getpid(), signal.SIGKILL)


DEATHS = ["rows", "private", "rename 1", "rename 2", "reach", "seal", "keep", "carry", "flip"]


def arm(death: str, patch: pytest.MonkeyPatch) -> None:
    """Make this process kill itself right before a call, or before its second call for names that end in 2."""
    name, _, count = death.partition(" ")
    if name == "rows":
        return patch.setattr(replicas, "write_rows", half_of_the_rows)
    owner = {"private": extras, "rename": os, "exchange": kinship}.get(name, Arena)
    real, left = getattr(owner, name), [int(count or 1)]

    def call(*arguments: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    return patch.setattr(owner, name, call)


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("death", DEATHS)
def test_a_host_that_is_killed_while_it_writes(
    tmp_path: Path, death: str, complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    run.copy(EVERYTHING)
    if complete:
        run.send()
        run.copy(EVERYTHING[::2])
        run.copy(EVERYTHING[1::3])
        run.seal()
    child = os.fork()
    if not child:
        try:
            arm(death, monkeypatch)
            run.send()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    reached = os.WIFSIGNALED(status)
    assert reached or death in ("rename 1", "rename 2"), "this death is of no use"
    check_what_is_left(run, complete)
    run.connect()
    assert run.send()
    assert equal(run)
    sweep(run.host)
    assert [path.name for path in run.host.iterdir()] == [RUN]


@pytest.mark.parametrize("death", ["exchange", "rename 1", "rename 2"])
def test_a_host_that_is_killed_while_a_copy_takes_its_own_memory_s_place(
    tmp_path: Path, death: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the two is always in the place: an earlier process's memory, or the complete copy."""
    run = Run(tmp_path)
    run.copy(EVERYTHING)
    own = run.host / RUN
    Arena.create(own, run.arena.layout, run_id=RUN, epoch=1).close()
    child = os.fork()
    if not child:
        try:
            arm(death, monkeypatch)
            run.send()
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    assert (own / FILE).exists()
    run.connect()
    assert run.send()
    assert equal(run)


def check_what_is_left(run: Run, complete: bool) -> None:
    """Check that recovery finds a true state after a death."""
    if not (run.host / RUN / FILE).exists():
        assert not complete
        return
    run.check()
