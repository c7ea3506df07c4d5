"""Test two states of one step: saved, replaced without a step, and saved again. Their mix is never called exact.

A second save that is cut by SIGKILL leaves some logs with the first state, and others with the second. In a store of an
earlier version a process has several logs; so have ranks.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import save_file

import scarctl
from scarctl.cli.main import cli
from scarctl.distributed.resume_step import RankState, agree_on_step
from scarctl.formats.state_file import open_state
from scarctl.ops.checkpoint import CheckpointSettings, checkpoint
from scarctl.recovery.reshard import find_parts
from scarctl.recovery.shared_plan import plan_lost, plans_back
from scarctl.recovery.shares import open_shares
from scarctl.store import Record, Store, StoreWriter, complete_sets, verify
from scarctl.store.backends.parallel import idle
from tests.session.counting import Counting
from tests.support.log_per_shard import store_with_a_log_per_shard
from tests.support.process import Forked, Tell
from tests.support.ranks import RankStore
from tests.support.training import drained

ROWS, STEP = 16, 5


class Numbers(Counting):
    """A table whose rows are in two shards, with a log each. Every value shows its state."""

    def __init__(self, store: Path, **options: Any) -> None:
        store_with_a_log_per_shard(store, shards=2, rows={"x": 1}).close()
        super().__init__(store, ROWS, **{"fraction": 0.5, "shards": 2, **options})

    def states(self) -> set[float]:
        return set(self.x.ravel().tolist())


def dies_between_shards() -> None:
    """Kill the process when the first of two shards has been sealed."""
    original, alone = StoreWriter.commit, threading.Lock()

    def commit(writer: StoreWriter, *args: Any, **kwargs: Any) -> Record:
        with idle():  # shards are committed at once, and the other one needs its turn to end
            alone.acquire()
        try:
            record = original(writer, *args, **kwargs)
            if record.sealed:
                os.kill(os.getpid(), signal.SIGKILL)
            return record
        finally:
            alone.release()

    StoreWriter.commit = commit  # type: ignore[method-assign]


def killed(body: Callable[[Tell], object]) -> None:
    with Forked(body) as child:
        assert child.wait(60) == -signal.SIGKILL


def arenas_are_gone(arena_dir: Path) -> None:
    """Remove the arenas, as a restart of the machine does."""
    for folder in arena_dir.glob("scarctl-*"):
        shutil.rmtree(folder)


def scarctl_json(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(cli, [*arguments, "--json"])
    assert done.exit_code in (0, 3), done.output
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def recovered(store: Path, output: Path, *options: str) -> dict[str, Any]:
    """Return the report of `scarctl recover`, which has written a file."""
    return scarctl_json("recover", "--store", str(store), "--lost", "all", "--output", str(output), *options)


def of_one_state(output: Path) -> bool:
    return len(set(open_state(output).tensor("x").ravel().tolist())) == 1


def full_then_replaced(store: Path) -> None:
    run = Numbers(store)
    run.train(STEP)
    run.session.checkpoint(full=True, wait=True)
    dies_between_shards()
    run.x[:] = 100
    run.session.checkpoint(full=True, wait=True)


def superseded(store: Path) -> None:
    first = Numbers(store)
    first.train(STEP)
    first.session.close()
    again = Numbers(store)
    again.session.supersede(STEP - 1)
    again.x[:] = 99
    dies_between_shards()
    again.train(1)
    drained([again.session])


@pytest.mark.parametrize("history", [full_then_replaced, superseded])
def test_a_second_state_of_a_step_that_is_cut_between_two_shards(
    tmp_path: Path, arena_dir: Path, warm_torch: None, history: Callable[[Path], None]
) -> None:
    store = tmp_path / "store"
    killed(lambda tell: history(store))
    arenas_are_gone(arena_dir)
    report = recovered(store, tmp_path / "mix.safetensors")
    assert not of_one_state(tmp_path / "mix.safetensors"), "the second save was not cut"
    assert (report["step"], report["consistent"]) == (STEP, False)
    back = recovered(store, tmp_path / "back.safetensors", "--mode", "rollback")
    assert of_one_state(tmp_path / "back.safetensors")
    assert (back["step"], back["consistent"]) == (STEP, True)
    run = Numbers(store)
    resumed = run.session.resume()
    assert (resumed.step, resumed.consistent, len(run.states())) == (STEP, False, 2)
    run.session.close()
    assert verify(Store.open(store), read_data=True).intact


def test_a_snapshot_of_the_second_state_of_a_step(tmp_path: Path) -> None:
    run = Numbers(tmp_path / "store")
    run.train(STEP)
    run.session.snapshot("first")
    run.x[:] = 100
    run.session.snapshot("second")
    run.x[:] = 7
    run.session.close()
    for name, value in (("first", 5.0), ("second", 100.0)):
        again = Numbers(tmp_path / "store")
        resumed = again.session.resume(snapshot=name)
        assert (resumed.consistent, again.states()) == (True, {value})
        again.session.close(seal=False)


def save(store: Path, file: Path, value: float) -> None:
    """Run `scarctl checkpoint` with a file in which every value is `value`."""
    save_file({"x": np.full((ROWS, 4), value, np.float32)}, file)
    store_with_a_log_per_shard(store, shards=2, partition_bytes=16).close()
    settings = CheckpointSettings(store=str(store), step=80, policy="full", shards=2, partition_bytes=16)
    checkpoint(open_state(file), settings)


def test_a_file_that_is_saved_twice_as_of_one_step(tmp_path: Path, warm_torch: None) -> None:
    store, file = tmp_path / "store", tmp_path / "state.safetensors"
    save(store, file, 1)

    def body(tell: Tell) -> None:
        dies_between_shards()
        save(store, file, 2)

    killed(body)
    report = recovered(store, tmp_path / "mix.safetensors")
    assert not of_one_state(tmp_path / "mix.safetensors")
    assert (report["step"], report["consistent"]) == (80, False)
    exported = scarctl_json("export", "--store", str(store), str(tmp_path / "exported"))
    assert not exported["consistent"]
    back = recovered(store, tmp_path / "back.safetensors", "--mode", "rollback")
    assert of_one_state(tmp_path / "back.safetensors")
    assert (back["step"], back["consistent"]) == (80, True)
    save(store, file, 2)  # again, and whole
    assert recovered(store, tmp_path / "both.safetensors")["consistent"]


def test_ranks_that_have_saved_two_states_of_a_step(tmp_path: Path) -> None:
    """The second whole commit has reached only one rank."""
    ranks = RankStore(tmp_path / "s", 3)
    ranks.save(5)
    ranks.save(5, [1], whole="cd" * 16)
    ranks.close()
    store = Store.open(tmp_path / "s")
    (only,) = complete_sets(store)
    assert only.whole == ranks.whole(5)
    state = open_shares(store)
    nothing = [None] * 3
    assert not plan_lost(state, state.everything(), nothing).consistent
    back = next(plans_back(state, nothing, 0, None))
    assert (back.consistent, back.step) == (True, 5)
    parts = find_parts(store)
    assert parts is not None
    assert parts.whole == ""


def test_ranks_at_one_step_agree_that_their_states_are_not_one() -> None:
    one, other = (RankState(5, True, whole=name * 16) for name in ("ab", "cd"))
    assert agree_on_step([one, one]).label.of_one
    assert not agree_on_step([one, other]).label.of_one
    nothing = RankState(5, survived=False, owns=False)
    assert agree_on_step([one, one, nothing]).label.of_one


def test_all_of_an_earlier_step_with_the_extras_of_now_is_not_exact(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    with scarctl.attach(
        model, optimizer, store=tmp_path / "s", interval=100, settings=scarctl.Settings(daemon=False)
    ) as session:
        session.resume()
        for step in range(1, 8):
            optimizer.zero_grad()
            model(torch.rand(2, 4)).sum().backward()
            optimizer.step()
            if step == 5:
                session.checkpoint(full=True, wait=True)
        report = session.recover("all")
        assert report.step == 5
        assert not report.consistent
        session.checkpoint(full=True, wait=True)
        assert session.recover("all").consistent
