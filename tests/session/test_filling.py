"""Test that a resume from the store returns before the arena is full, and that nothing is lost meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import scarctl
from scarctl.arena.arena import Arena
from scarctl.errors import ScarError, Unavailable
from scarctl.peers.follower import Follower
from scarctl.peers.frames import Kind
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
