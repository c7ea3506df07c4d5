"""Test what commands, figures and departures say of a session whose arena is still being filled after a resume."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import scarctl
from scarctl.daemon.client import ask_status
from scarctl.ops.health import health_of
from scarctl.ops.known import daemon_here, runs_of
from scarctl.ops.live import checkpoint_live
from scarctl.ops.survey import survey
from scarctl.state.version import step_of
from scarctl.store import Store
from tests.session.test_filling import Run, same

pytestmark = pytest.mark.usefixtures("small_states_too")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a store with the third step of a run that has ended."""
    run = Run(tmp_path / "store", 1, "first")
    for _ in range(3):
        run.step()
    run.session.close()
    return tmp_path / "store"


@pytest.mark.usefixtures("daemon_folder")
def test_commands_neither_alarm_nor_take_the_resume_for_a_checkpoint(
    store: Path, arena_dir: Path, gate: threading.Event
) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(30, 700), nn.BatchNorm1d(700), nn.Linear(700, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session = scarctl.attach(
        model, optimizer, store=store, interval=1 << 30, settings=scarctl.Settings(daemon=True)
    )
    assert session.resume().consistent
    opened = Store.open(str(store))
    status = ask_status(Path(session._started().arena.folder).parent, patience=5)
    assert status is not None
    (of_run,) = status["runs"]
    assert (of_run["head_step"], of_run["durable_step"], of_run["oldest_durable_step"]) == (3, 3, 3)
    health = health_of(survey(opened, str(arena_dir)), runs_of(daemon_here(str(arena_dir)), opened.run_id))
    assert health.well
    assert [loss.steps for loss in health.losses.values()] == [0, 0, 0]
    assert [saving.lag for saving in health.saving] == [0]

    made: list[Any] = []
    asking = threading.Thread(
        target=lambda: made.append(checkpoint_live(opened, full=False, timeout=100, arena_dir=str(arena_dir)))
    )
    asking.start()
    time.sleep(0.3)
    gate.set()
    session._saving.finish()
    time.sleep(0.3)
    assert not made, "what the resume has brought into memory is no new checkpoint"
    while asking.is_alive():
        optimizer.zero_grad()
        model(torch.randn(4, 30)).square().sum().backward()
        optimizer.step()
        asking.join(0.05)
    assert step_of(made[0].version) > 3
    session.close()


@pytest.mark.parametrize("grace", [None, 1.5])
def test_a_departure_does_not_wait_longer_than_it_may(
    store: Path, gate: threading.Event, grace: float | None
) -> None:
    run = Run(store, 2, "second", grace=grace)
    run.session.resume()
    began = time.monotonic()
    if grace is None:
        found = run.session.evacuate(0.6)
        assert (found.step, found.safe, found.lost_partitions) == (3, True, 0), "no step has ended since"
    else:
        leaving = threading.Thread(target=run.session._departure.before_signal, args=(signal.SIGTERM, False))
        leaving.start()
        leaving.join(30)
    assert time.monotonic() - began < 25
    gate.set()
    run.step()
    assert run.session.flush()
    run.session.close()


def test_a_model_may_be_moved_into_shared_memory(store: Path, gate: threading.Event) -> None:
    run = Run(store, 2, "second")
    run.session.resume()
    expected = run.state()
    kept = [torch.full((1000, 1000), 7.0) for _ in range(3)]
    run.model.share_memory()
    kept += [torch.full((700, 30), 7.0) for _ in range(200)]  # takes the memory that was freed
    gate.set()
    run.session._saving.finish()
    assert run.arena.intact().all()
    assert same(run.state(), expected)
    run.step()
    run.session.close()
