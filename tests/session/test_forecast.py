"""Test the predicted rework of a real run: in its session, after its end, and on the command line."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

import scarctl
from scarctl.arena.arena import Arena
from scarctl.arena.folder import arena_folder
from scarctl.cli.main import cli
from scarctl.config import grouped
from scarctl.errors import ScarError
from scarctl.state.extras import Notes
from scarctl.store import Store
from scarctl.theory.history import History
from tests.support import forkserver
from tests.support.training import drained

RATE = 0.95


class Descent:
    """A run that moves straight to 0 by a factor of 0.95 per iteration, from a distance of 8."""

    def __init__(self, store: Path, **options: Any) -> None:
        self.state = {"x": np.ones((64, 1))}
        settings = {"interval": 2, "fraction": 0.5, "policy": "round", "shards": 4, "rows": {"x": 1}}
        self.session = scarctl.attach(self.state, store=store, **grouped(**(settings | options)))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.state["x"] *= RATE
            self.session.step()
            self.session._saving.finish()
            drained([self.session])

    @property
    def history(self) -> History:
        assert self.session._engine is not None
        return self.session._engine.motion.history


def invoke(*arguments: object, code: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(cli, [*map(str, arguments), "--json"])
    assert result.exit_code == code, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def saved(store: Path) -> History:
    """Return the history in the newest extras."""
    opened = Store.open(store)
    found = [opened.read_extras(opened.state(shard)) for shard in opened.shards()]
    newest = max((one for one in found if one is not None), key=lambda one: one[0])
    notes = Notes.from_tree(newest[1])
    assert notes.norm == "l2"
    return History.from_array(notes.points)


def test_a_session_knows_how_fast_it_converges_and_what_a_loss_costs(tmp_path: Path) -> None:
    job = Descent(tmp_path / "store")
    job.train(41)
    before = np.linalg.norm(job.state["x"])
    report = job.session.recover([0, 1])
    truth = np.log(np.linalg.norm(job.state["x"]) / before) / -np.log(RATE)
    assert report.cost is not None
    assert truth > 0.4, "memory's copies are of the step before"
    assert report.cost.rework.iterations == pytest.approx(truth, rel=0.25)
    assert report.cost.rework.low is not None
    assert report.cost.rework.high is not None
    assert report.cost.rework.high >= truth
    assert report.cost.rollback_steps == 40, "only the first step was sealed"
    assert report.to_json()["rework"]["basis"] == "distances"
    again = job.session.recover([0, 1])
    assert again.cost is not None
    assert again.cost.rework.iterations == 0, "the same copies are no loss"
    job.session.close()


def test_the_recovery_is_no_motion(tmp_path: Path) -> None:
    job = Descent(tmp_path / "store")
    job.train(20)
    job.session.recover("all")
    points = job.history.points
    job.train(4)
    assert [point[:2] for point in job.history.points[len(points) :]] == [(22, 2)]
    job.session.close()


def test_what_may_cost_too_much_is_refused(tmp_path: Path) -> None:
    job = Descent(tmp_path / "store")
    job.train(41)
    before = job.state["x"].copy()
    with pytest.raises(ScarError) as refused:
        job.session.recover("all", max_rework=0.5)
    assert refused.value.kind == "too-much-rework"
    with pytest.raises(ScarError):
        job.session.recover("all", mode="rollback", max_rework=39)
    assert (job.state["x"] == before).all()
    assert job.session.recover("all", max_rework=30).mode == "partial"
    job.session.close()


def test_a_store_that_is_away_keeps_nobody_from_recovering(tmp_path: Path) -> None:
    job = Descent(tmp_path / "store")
    job.train(41)
    (tmp_path / "store").rename(tmp_path / "away")
    job.state["x"][:32] = np.nan
    assert job.session.recover([0, 1]).mode == "partial"
    assert job.session.recover([0, 1], mode="auto").mode == "partial"
    (tmp_path / "away").rename(tmp_path / "store")
    assert np.isfinite(job.state["x"][16:]).any()
    job.session.close()


def test_auto_goes_back_where_that_is_nearer(tmp_path: Path) -> None:
    job = Descent(tmp_path / "store", max_staleness=1000)
    job.train(40)
    # All copies are as old as this one; the cost of additional damage is more than a step.
    job.session.checkpoint(full=True, wait=True)
    job.train(1)
    job.state["x"][:32] += 5.0
    report = job.session.recover([0, 1], mode="auto")
    assert (report.mode, report.step) == ("rollback", 40)
    assert report.cost is not None
    assert (report.cost.rework.iterations, report.cost.rework.basis) == (1.0, "steps")
    assert job.session.head_step == 40
    assert job.history.points[-1][:2] == (38, 2), "what came later is forgotten"
    job.train(4)
    job.session.close()


def test_the_history_goes_on_after_a_restart(tmp_path: Path, both_savers: str) -> None:
    job = Descent(tmp_path / "store")
    job.train(30)
    job.session.close()
    assert [point[:2] for point in saved(tmp_path / "store").points] == [(k, 2) for k in range(2, 29, 2)]
    again = Descent(tmp_path / "store")
    assert again.session.resume(mode="auto").step == 30
    again.train(10)
    again.session.close()
    steps = [point[0] for point in saved(tmp_path / "store").points]
    assert steps == [*range(2, 29, 2), *range(32, 39, 2)]
    line = invoke("inspect", "--store", tmp_path / "store")["convergence"]
    assert line["c_interval"][0] <= RATE <= line["c_interval"][1]
    assert line["distance"] == pytest.approx(8 * RATE**40, rel=0.05)


SEALED = """
import os, signal, sys
from pathlib import Path
from tests.session.test_forecast import Descent

job = Descent(Path(sys.argv[1]), daemon=False, fraction=1 / 32)
job.train(40)
job.session.checkpoint(full=True, wait=True)
job.train(3)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.leaves_arena
def test_the_command_goes_back_where_that_is_nearer(tmp_path: Path, arena_dir: Path) -> None:
    store, output = tmp_path / "store", tmp_path / "whole.safetensors"
    done = forkserver.run(["-c", SEALED, str(store)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    # Memory has no copies, and the store's copies are far from what the run had.
    run = Store.open(store).run_id
    arena = Arena.open_existing(arena_folder(str(arena_dir), run), run_id=run)
    assert arena is not None
    arena.distance[:] = 5.0
    arena.slot.begin(np.arange(arena.layout.partitions))
    arena.slot.name("")
    arena.close()
    call = ("recover", "--store", store, "--lost", "all", "--output", output, "--mode", "auto")
    plan = invoke(*call, "--dry-run")
    assert (plan["mode"], plan["rollback_steps"]) == ("rollback", 3)
    with pytest.raises(AssertionError, match="too-much-rework"):
        invoke(*call, "--max-rework", 2)
    assert not output.exists()
    found = invoke(*call, "--max-rework", 3)
    assert (found["mode"], found["step"], found["consistent"]) == ("rollback", 40, True)
    assert found["rework"] == {"iterations": 3.0, "low": 3.0, "high": 3.0, "basis": "steps", "reason": None}
    assert "rollback 3" in found["reason"]
    assert np.allclose(load_file(output)["x"], RATE**40)
    # In place the store rolls back as well, and the stopped run's later copies are forgotten.
    into = invoke("recover", "--store", store, "--lost", "all", "--mode", "auto", "--into", output)
    assert into["mode"] == "rollback"
    job = Descent(store)
    assert job.session.resume().step == 40
    assert job.history.points[-1][:2] == (38, 2)
    job.session.close()


def test_distances_in_another_norm_are_not_taken_for_perturbations(tmp_path: Path) -> None:
    job = Descent(tmp_path / "store", norm="rms")
    job.train(41)
    job.state["x"][:] = np.nan
    report = job.session.recover("all")
    assert report.cost is not None
    assert report.cost.rework.basis == "ages"
    job.session.close()
