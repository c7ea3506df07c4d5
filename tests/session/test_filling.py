"""Test that a resume from the store returns before the arena is full, that nothing is lost then, and what is said."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import scarctl
from scarctl.arena.arena import Arena
from scarctl.daemon.client import ask_status
from scarctl.errors import ScarError, Unavailable
from scarctl.ops.health import health_of
from scarctl.ops.known import daemon_here, runs_of
from scarctl.ops.live import checkpoint_live
from scarctl.ops.survey import survey
from scarctl.peers.follower import Follower
from scarctl.peers.frames import Kind
from scarctl.state.version import step_of
from scarctl.store import Store
from tests.support.training import state_of

pytestmark = pytest.mark.usefixtures("small_states_too")

State = dict[str, torch.Tensor]


class Run:
    """A model with AdamW and a batch norm, whose buffers a forward pass changes."""

    def __init__(self, store: Path, seed: int, host: str, **options: Any) -> None:
        (store.parent / host).mkdir(exist_ok=True)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(30, 700), nn.BatchNorm1d(700), nn.Linear(700, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.session = scarctl.attach(
            self.model,
            self.optimizer,
            store=store,
            interval=1 << 30,
            partitioning=scarctl.Partitioning(partition_bytes=10_000),
            settings=scarctl.Settings(daemon=False, arena_dir=store.parent / host, **options),
        )

    @property
    def arena(self) -> Arena:
        return self.session._started().arena

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 30)).square().sum().backward()
        self.optimizer.step()

    def state(self) -> State:
        return state_of(self.model, self.optimizer)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def saved(store: Path) -> State:
    """Return the state of a run of three steps that has ended."""
    run = Run(store, 1, "first")
    for _ in range(3):
        run.step()
    run.session.close()
    return run.state()


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_resume_returns_before_the_arena_is_full(store: Path, saved: State, gate: threading.Event) -> None:
    run = Run(store, 2, "second")
    assert run.session.resume().consistent
    assert same(run.state(), saved)
    arena = run.arena
    assert arena.is_filling
    assert not arena.intact().any()
    blocks = os.stat(arena.folder / "arena").st_blocks * 512
    assert blocks < arena.layout.nbytes // 2, "its rows have no space yet"
    gate.set()
    run.step()
    assert not arena.is_filling
    assert arena.intact().all()
    assert not arena.pending().any()
    run.session.checkpoint(full=True, wait=True)
    after = run.state()
    run.session.recover("all")
    assert same(run.state(), after)
    run.session.close()
    again = Run(store, 3, "third")
    assert again.session.resume().consistent
    assert same(again.state(), after)
    again.session.close()


def test_what_a_loop_writes_meanwhile_does_not_count_as_the_stores_copy(
    store: Path, saved: State, gate: threading.Event
) -> None:
    run = Run(store, 2, "second")
    run.session.resume()
    with torch.no_grad():
        run.model[0].weight[600].fill_(7)
    gate.set()
    run.session._saving.finish()
    layout, lacks = run.arena.layout, np.flatnonzero(~run.arena.intact())
    assert [layout.name(int(i)).split("[")[0] for i in lacks] == ["0.weight"]
    assert run.session._started().filling.lacks_copies
    assert run.arena.whole == ""
    kinds = [bytes(frame[0])[0] for frame in Follower(run.arena).round()]
    assert kinds[-1] == Kind.MARK, "another host does not wait for them"
    report = run.session.recover("0.weight")
    assert report.tiers.keys() == {"memory", "store"}
    assert same(run.state(), saved)
    run.step()
    run.session.checkpoint(full=True, wait=True)
    assert run.arena.intact().all()
    assert not run.session._started().filling.lacks_copies
    run.session.close()


def test_copies_are_not_made_in_an_arena_without_space(
    store: Path, saved: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Unavailable("no room", kind="arena-full")

    def refuse(self: Arena) -> None:
        raise full

    run = Run(store, 2, "second")
    with monkeypatch.context() as patch:
        patch.setattr(Arena, "reserve_rows", refuse)
        run.session.resume()
        run.step()
        assert run.session.stats.last_error == str(full)
        with pytest.raises(Unavailable, match="no room"):
            run.session.checkpoint(full=True, wait=True)
        with pytest.raises(Unavailable, match="no room"):
            run.session.recover("all")
        assert not run.session.flush()
        assert not run.arena.intact().any()
    run.session.checkpoint(full=True, wait=True)
    assert run.arena.intact().all()
    after = run.state()
    run.session.close()
    again = Run(store, 3, "third")
    assert again.session.resume().consistent
    assert same(again.state(), after)
    again.session.close()


@pytest.mark.parametrize("end", ["close", "evacuate"])
def test_a_session_may_end_at_once(store: Path, saved: State, end: str) -> None:
    run = Run(store, 2, "second")
    run.session.resume()
    if end == "evacuate":
        assert run.session.evacuate(10).sealed
    run.session.close()
    again = Run(store, 3, "third")
    assert again.session.resume().consistent
    assert same(again.state(), saved)
    again.session.close()


@pytest.mark.leaves_arena
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("reserve_rows", 0),
        ("put_rows", 0),
        ("put_rows", 9),
        ("flip", 0),
        ("acknowledge", 0),
        ("end_filling", 0),
    ],
)
def test_a_process_killed_meanwhile_has_lost_nothing(store: Path, saved: State, name: str, call: int) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)
            real, calls = getattr(Arena, name), [0]

            def last(self: Arena, *arguments: Any) -> Any:
                if calls[0] == call and self.is_filling:
                    os.kill(os.getpid(), signal.SIGKILL)
                calls[0] += 1
                return real(self, *arguments)

            setattr(Arena, name, last)
            run = Run(store, 2, "second")
            run.session.resume()
            run.step()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    run = Run(store, 3, "second")
    resumed = run.session.resume()
    assert (resumed.step, resumed.consistent) == (3, True)
    assert same(run.state(), saved)
    run.step()
    assert run.arena.intact().all()
    run.session.close()


def test_after_ctrl_c_the_arena_is_not_closed_before_it_is_full(
    store: Path, saved: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, gate, files, put_rows = threading.Event(), threading.Event(), list[int](), Arena.put_rows

    def held(self: Arena, *arguments: Any) -> None:
        begun.set()
        assert gate.wait(60)
        files.append(self._file)
        put_rows(self, *arguments)

    monkeypatch.setattr(Arena, "put_rows", held)
    run = Run(store, 2, "second", flush_on_signal=False)
    run.session.resume()
    assert begun.wait(60)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    threading.Timer(1.5, gate.set).start()
    with pytest.raises(KeyboardInterrupt):
        run.step()
    run.session.close(seal=False)
    assert min(files) >= 0
    again = Run(store, 3, "third")
    assert again.session.resume().consistent
    again.session.close()


def test_values_that_are_not_finite_never_replace_the_stores_copies(
    store: Path, gate: threading.Event
) -> None:
    def attach(host: str) -> tuple[nn.Linear, scarctl.Session]:
        (store.parent / host).mkdir()
        model = nn.Linear(30, 700)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        settings = scarctl.Settings(daemon=False, arena_dir=store.parent / host)
        session = scarctl.attach(model, optimizer, store=store, interval=1 << 30, settings=settings)
        if session.resume().new:
            optimizer.step()
        return model, session

    gate.set()
    attach("first")[1].close()
    gate.clear()
    model, session = attach("second")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)  # so that memory gets none of the store's copies
    gate.set()
    session._saving.finish()
    assert not session._started().arena.intact().any()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    for checkpoints in (1, 2):
        with pytest.raises(ScarError, match="could not be sealed: values are not finite"):
            session.checkpoint(full=True, wait=True)
        assert session.stats.nonfinite_partitions == checkpoints * session.layout.partitions
    assert session._started().filling.lacks_copies
    assert not session._started().is_sealed()
    session.close(seal=False)
    model, session = attach("third")
    assert model.weight.isfinite().all()
    session.close()


@pytest.mark.usefixtures("daemon_folder", "saved")
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


@pytest.mark.usefixtures("saved")
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


@pytest.mark.usefixtures("saved")
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
