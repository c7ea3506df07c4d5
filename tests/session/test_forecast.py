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


def test_what_nobody_can_tell_is_refused_too(tmp_path: Path) -> None:
    job = Descent(tmp_path / "store")
    job.train(1)
    job.state["x"] *= RATE
    with pytest.raises(ScarError, match="no predicted cost"):
        job.session.recover("all", max_rework=1e9)
    report = job.session.recover("all", mode="auto")
    assert report.mode == "partial"
    assert report.cost is not None
    assert report.cost.reason is not None
    assert "Theorem 4.1" in report.cost.reason
    job.session.close()


def test_before_a_rate_is_known_staleness_is_predicted(tmp_path: Path) -> None:
    job = Descent(tmp_path / "store")
    job.train(5)
    report = job.session.recover("all", mode="auto", max_rework=20)
    assert report.cost is not None
    rework = report.cost.rework
    assert (report.mode, rework.basis) == ("partial", "staleness")
    assert rework.high is not None
    assert 0 < rework.high < 20
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


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.session.test_forecast import Descent

job = Descent(Path(sys.argv[1]), daemon=False)
job.train(int(sys.argv[2]))
os.kill(os.getpid(), signal.SIGKILL)
"""


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
    # All of memory is torn, and the store's copies are far from what the run had.
    run = Store.open(store).run_id
    arena = Arena.open_existing(arena_folder(str(arena_dir), run), run_id=run)
    assert arena is not None
    arena.distance[:] = 5.0
    arena.begin(np.arange(arena.layout.partitions))
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


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """Return the store of a run that was killed after 45 iterations; its arena is left."""
    done = forkserver.run(["-c", KILLED, str(tmp_path / "store"), "45"], timeout=60)
    assert done.returncode == -signal.SIGKILL
    return tmp_path / "store"


@pytest.mark.leaves_arena
def test_commands_tell_what_a_killed_run_would_cost(killed: Path, tmp_path: Path) -> None:
    seen = invoke("inspect", "--store", killed, "--limit", 0)
    assert seen["convergence"]["c"] == pytest.approx(RATE, abs=2e-3)
    assert 0 <= seen["effective_staleness"] < 2, "memory is of step 44"
    for line in seen["shards"]:
        rework = line["rework"]
        assert rework["basis"] == "distances"
        assert 0 < rework["low"] <= rework["iterations"] <= rework["high"] < 8
        assert line["share"] == 0.25
        assert line["expected_perturbation"] == pytest.approx(line["perturbation"]["value"], rel=0.5)
    assert "convergence: c = 0.9" in CliRunner().invoke(cli, ["inspect", "--store", str(killed)]).output
    call = ("recover", "--store", killed, "--lost", "0", "--output", tmp_path / "lost.safetensors")
    plan = invoke(*call, "--dry-run", "--mode", "auto")
    assert (plan["mode"], plan["rollback_steps"]) == ("partial", 44)
    assert "predicted: partial" in plan["reason"]
    # The file is made from memory, and a shard that inspect counts as lost comes from the store.
    assert plan["rework"]["iterations"] < seen["shards"][0]["rework"]["iterations"]
    refused = invoke(*call, "--max-rework", 0.1, code=1)
    assert refused["error"]["kind"] == "too-much-rework"
    assert not (tmp_path / "lost.safetensors").exists()
    text = CliRunner().invoke(cli, [*map(str, call), "--max-rework", "10", "--mode", "auto"]).output
    assert "predicted rework: " in text
    assert "mode partial: predicted" in text
    # Copies in memory count as lost when they are the ones to be restored: those of the store are older, or
    # as old.
    into = invoke("recover", "--store", killed, "--lost", "0", "--dry-run")
    assert into["rework"]["iterations"] >= plan["rework"]["iterations"] * 0.999


def test_without_its_memory_ages_have_to_do(killed: Path, arena_dir: Path) -> None:
    for folder in arena_dir.rglob("arena"):
        folder.unlink()
    seen = invoke("inspect", "--store", killed)
    assert {line["rework"]["basis"] for line in seen["shards"]} == {"ages"}
    assert all(0 <= line["rework"]["iterations"] <= 6 for line in seen["shards"])
    job = Descent(killed)
    resumed = job.session.resume()
    assert resumed.report is not None
    assert (resumed.step, resumed.report.mode) == (44, "partial"), "the only state of one step is far older"
    job.session.close()


@pytest.mark.parametrize("norm", ["rms", "relative"])
def test_distances_in_another_norm_are_not_taken_for_perturbations(tmp_path: Path, norm: str) -> None:
    job = Descent(tmp_path / "store", norm=norm)
    job.train(41)
    job.state["x"][:] = np.nan
    report = job.session.recover("all")
    assert report.cost is not None
    assert report.cost.rework.basis == "ages"
    job.session.close()


def test_stores_of_before_tell_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Notes, "to_tree", lambda _: {})
    job = Descent(tmp_path / "store")
    job.train(20)
    job.session.close()
    monkeypatch.undo()
    seen = invoke("inspect", "--store", tmp_path / "store")
    assert "no session has saved" in seen["convergence"]["reason"]
    again = Descent(tmp_path / "store")
    assert again.session.resume().step == 20
    again.train(2)
    again.session.close()
