"""Test distances that are found in pieces, between checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import scarctl
from scarctl.arena.arena import Arena
from scarctl.checkpoint import overlapped, tracker
from scarctl.checkpoint.distance import Scratch
from scarctl.checkpoint.live_state import LiveState
from scarctl.checkpoint.overlapped import Sweep
from scarctl.config import grouped
from scarctl.state.layout import Layout, TensorSpec, build_layout
from scarctl.state.version import pack, step_of
from tests.support.training import drained

SIZES = {"a": 40, "b": 7, "c": 53}
"""Rows of the groups, one partition each."""
ALL = [0, 1, 2]


def _state() -> tuple[Layout, LiveState, Sweep]:
    """Return a state that has moved since the last comparison."""
    specs = {name: (TensorSpec("", "F32", (rows, 8)),) for name, rows in SIZES.items()}
    layout = build_layout([(name, "parameter", spec) for name, spec in specs.items()], rows={"*": 1})
    generator = torch.Generator().manual_seed(0)
    tensors = [[torch.randn(rows, 8, generator=generator)] for rows in SIZES.values()]
    live = LiveState(layout, tensors, Arena.anonymous(layout))
    live.save(np.arange(layout.partitions), pack(1, 1))
    found = Sweep(layout, "l2")
    assert not _known(found, live).any()
    for (tensor,) in tensors:
        tensor += torch.rand(tensor.shape, generator=generator)
    return layout, live, found


def _known(sweep: Sweep, live: LiveState) -> np.ndarray:
    return np.concatenate(sweep.distances(live, ALL, Scratch()))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlapped, "_PIECE", 3 * 32)
    monkeypatch.setattr(overlapped, "_GROUP", 0)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("share", [1.0, 0.5, 0.3, 0.1])
def test_looks_go_around(share: float) -> None:
    layout, live, found = _state()
    seen = np.zeros(layout.partitions, dtype=bool)
    for turn in range(1, 25):
        found.look(live, ALL, share)
        now = _known(found, live) > 0
        assert (now >= seen).all()
        assert now.sum() >= min(100, int(100 * share * turn))
        assert now.sum() <= seen.sum() + 100 * share + 3
        seen = now
        if seen.all():
            break
    np.testing.assert_allclose(_known(found, live), live.distances(), rtol=1e-6)
    live.tensors[0][0] += 1
    assert (_known(found, live)[:40] < live.distances()[:40]).all(), "only looks see it"
    for _ in range(turn):
        found.look(live, ALL, share)
    np.testing.assert_allclose(_known(found, live), live.distances(), rtol=1e-6)


@pytest.mark.usefixtures("small_pieces")
def test_groups_that_are_left_out_are_not_read() -> None:
    _, live, found = _state()
    for _ in range(3):
        found.look(live, [0, 2], 0.5)
    known = _known(found, live)
    assert known[:40].all()
    assert not known[40:47].any()
    assert known[47:].all()


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("groups", [[0], [1], [2], [0, 1], [0, 2], [1, 2], ALL])
def test_a_turn_has_every_partition_once_in_order(groups: list[int]) -> None:
    layout, _, found = _state()
    all_of_them = np.concatenate([np.arange(layout.base[g], layout.base[g + 1]) for g in groups])
    for at in range(layout.partitions + 1):
        found._next = at
        pieces = list(found._pieces(groups, np.inf))
        wanted = np.roll(all_of_them, -int(np.searchsorted(all_of_them, at)))
        np.testing.assert_array_equal(np.concatenate(pieces), wanted)
        assert all((np.diff(ids) > 0).all() for ids in pieces)
        assert {ids.size for ids in pieces} <= {1, 2, 3}
        some = np.concatenate(list(found._pieces(groups, 32 * 5)))
        np.testing.assert_array_equal(some, wanted[:5])


def test_many_small_groups_are_a_piece_only_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting checkpoint gets its turn soon, and a comparison does only its share."""
    monkeypatch.setattr(overlapped, "_PIECE", 64 << 10)
    specs = [(f"b{i}", "parameter", (TensorSpec("", "F32", (8,)),)) for i in range(100)]
    found = Sweep(build_layout(specs), "l2")
    groups = list(range(100))
    assert [ids.size for ids in found._pieces(groups, np.inf)] == [2] * 50
    assert [ids.size for ids in found._pieces(groups, 32 * 3)] == [2, 1]


def test_nothing_to_look_at() -> None:
    _, live, found = _state()
    found.look(live, [], 0.5)
    assert not _known(found, live).any()


def test_what_is_not_known_is_compared_when_it_is_asked_for() -> None:
    _, live, found = _state()
    found.forget(slice(None))
    np.testing.assert_allclose(_known(found, live), live.distances(), rtol=1e-6)
    live.tensors[0][0] += 1
    found.forget(np.array([3, 4, 50]))
    exact, known = live.distances(), _known(found, live)
    np.testing.assert_allclose(known[[3, 4, 50]], exact[[3, 4, 50]], rtol=1e-6)
    assert known[5] < exact[5]


def test_values_that_were_not_finite_are_looked_at_until_they_are() -> None:
    _, live, found = _state()
    live.tensors[1][0][2, 5] = torch.nan
    found.look(live, ALL, 1.0)
    assert np.flatnonzero(~np.isfinite(_known(found, live))).tolist() == [42]
    live.tensors[1][0][2, 5] = 0.0
    np.testing.assert_allclose(_known(found, live), live.distances(), rtol=1e-6)


@pytest.mark.usefixtures("small_pieces")
def test_a_look_ends_when_a_checkpoint_waits() -> None:
    _, live, found = _state()
    found.interrupt()
    found.look(live, ALL, 1.0)
    assert not _known(found, live).any()
    found.allow_full_looks()
    found.look(live, ALL, 1.0)
    assert _known(found, live).all()


class Job:
    """A model whose distances come from a function that can be held up."""

    def __init__(self, store: Path) -> None:
        self.go, self.entered, self.fails = threading.Event(), threading.Event(), False
        self.go.set()
        torch.manual_seed(0)
        self.model = nn.Linear(16, 64, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

        def norm(live: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> torch.Tensor:
            self.entered.set()
            self.go.wait()
            if self.fails:
                raise RuntimeError("no distance today")
            return (live[""] - saved[""]).norm(dim=1)

        self.session = scarctl.attach(
            self.model,
            self.optimizer,
            store=store,
            interval=4,
            partitioning=scarctl.Partitioning(rows={"*": 1}),
            selection=scarctl.Selection(norm=norm, tracker="overlapped"),
            settings=scarctl.Settings(daemon=False, flush_on_signal=False),
        )

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.rand(8, 16)).sum().backward()  # moves every row by the same amount, forever
        self.optimizer.step()

    def hold_up_a_look(self) -> None:
        """Wait until a comparison is in progress; it continues when `go` is set."""
        for _ in range(4):
            self.step()
        self.session.checkpoint()
        self.settle()
        self.entered.clear()
        self.go.clear()
        self.step()
        assert self.entered.wait(60)

    def settle(self) -> None:
        """Wait until the worker is idle."""
        self.session._saving.worker.submit(lambda: None).wait()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(tracker, "SMALL", 0)
    made = Job(tmp_path / "store")
    yield made
    made.go.set()
    made.session.close()


def test_no_step_waits_for_a_look(job: Job) -> None:
    job.hold_up_a_look()
    before = job.session.stats.checkpoints
    for _ in range(2):
        job.step()
    assert not job.go.is_set()
    assert job.session.head_step == 7
    job.go.set()
    for _ in range(2):
        job.step()
    assert job.session.stats.checkpoints == before + 1
    assert job.session.stats.errors == 0


def test_partial_checkpoints_find_what_has_moved(job: Job) -> None:
    for _ in range(40):
        job.step()
        job.session._finish()
        drained([job.session])  # partitions that wait for the store are not chosen again
        job.settle()
    engine = job.session._engine
    assert engine is not None
    live = job.session._binding.live(engine.arena)
    exact, known = live.distances(job.session.settings.norm), engine.tracker.distances(live, 40)
    saved = known == 0
    np.testing.assert_array_equal(saved, exact == 0)
    assert 0.5 < np.median(known[~saved] / exact[~saved]) <= 1.001
    assert engine.saver.drain(60)
    assert len(np.unique(engine.arena.version)) > 4, "eighths of it were saved at different steps"


def test_the_first_checkpoints_after_a_sealed_one_save_something(job: Job) -> None:
    saved = []
    for _ in range(12):
        before = job.session.stats.saved_bytes
        job.step()
        job.session._finish()
        drained([job.session])
        if job.session.stats.saved_bytes > before:
            saved.append(job.session.head_step)
    assert saved == [1, 4, 8, 12]


def test_what_no_look_has_reached_since_it_was_saved_is_compared_at_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that saves by hand, with an infinite interval, is hardly ever compared."""
    monkeypatch.setattr(tracker, "SMALL", 0)
    monkeypatch.setattr(overlapped, "_PIECE", 1)
    model = nn.Linear(16, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"rows": {"*": 1}, "interval": 10**6, "fraction": 0.25, "daemon": False}
    with scarctl.attach(model, optimizer, store=tmp_path / "store", **grouped(**options)) as session:
        saved = []
        for _ in range(10):
            for _ in range(3):
                model.weight.grad = torch.ones_like(model.weight)
                optimizer.step()
            session._finish()
            drained([session])
            before = session.stats.saved_bytes
            session.checkpoint()
            saved.append((session.stats.saved_bytes - before) // 64)
            drained([session])
        assert saved == [16] * 10


def test_groups_that_are_trained_again_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "SMALL", 0)
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"interval": 2, "fraction": 0.999, "daemon": False, "rows": {"*": 1}, "tracker": "overlapped"}
    with scarctl.attach(model, optimizer, store=tmp_path / "store", **grouped(**options)) as session:
        for step in range(1, 13):
            model["b"].requires_grad_(step % 4 == 0)  # frozen at every other checkpoint
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            session._finish()
            drained([session])
        engine = session._engine
        assert engine is not None
        assert step_of(engine.arena.version[4:8]).tolist() == [12] * 4


def test_closing_waits_for_a_look(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.hold_up_a_look()
    engine, looking = job.session._engine, []
    assert engine is not None
    monkeypatch.setattr(engine.pinning, "end", lambda: looking.append(not job.go.is_set()))
    closing = threading.Thread(target=job.session.close, kwargs={"seal": False})
    closing.start()
    closing.join(0.5)
    job.go.set()
    closing.join()
    assert looking == [False], "it reads the memory that is unpinned"


def test_a_look_that_fails_is_told(job: Job) -> None:
    for _ in range(5):
        job.step()
        job.settle()
    job.fails = True
    job.step()
    job.settle()
    job.step()
    assert "no distance today" in job.session.stats.last_error
    job.settle()
    job.fails = False
    job.step()
    errors = job.session.stats.errors
    for _ in range(6):
        job.step()
        job.settle()
    assert job.session.stats.errors == errors
