"""Test that a stopped loop with Accelerate continues bit for bit like an uninterrupted one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from scarctl.errors import UsageError
from scarctl_adapters.accelerate import attach_and_resume
from tests.adapters.accelerate_runs import EXACT, Loop, forget_accelerators, go
from tests.support.training import differing

# A resumed process may begin by stepping a schedule at the end of an epoch.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    forget_accelerators()


@pytest.fixture(scope="module")
def whole() -> dict[str, torch.Tensor]:
    """Return the run without scarctl."""
    return go(Path())[0]


def test_beside_scarctl_a_run_is_what_it_is_without(tmp_path: Path, whole: dict[str, torch.Tensor]) -> None:
    state, resumed = go(tmp_path, options={})
    assert (resumed.step, resumed.consistent) == (0, True)
    assert differing(state, whole) == []


def test_a_run_that_is_done_trains_nothing_and_a_longer_one_goes_on(
    tmp_path: Path, whole: dict[str, torch.Tensor]
) -> None:
    go(tmp_path, options={})
    forget_accelerators()
    loop = Loop(99)
    run = attach_and_resume(loop.accelerator, store=tmp_path / "store", **EXACT)
    assert run.resumed.step == 18
    assert list(run.epochs(3)) == []
    assert run.epoch == 3
    forget_accelerators()
    loop = Loop(99)
    run = attach_and_resume(loop.accelerator, store=tmp_path / "store", **EXACT)
    loop.train(run, epochs=4)
    assert run.session.head_step == 24
    assert len(loop.meter.losses) == 24


def test_the_end_of_the_epochs_closes_the_run(tmp_path: Path) -> None:
    forget_accelerators()
    loop = Loop()
    run = attach_and_resume(loop.accelerator, store=tmp_path / "store", **EXACT)
    loop.train(run)
    with pytest.raises(UsageError, match="the session is closed"):
        run.session.checkpoint()
    for more in (run.epochs(4), run.batches(loop.loader)):
        with pytest.raises(UsageError, match="the run is closed: further changes would not be saved"):
            next(more)
    forget_accelerators()
    with attach_and_resume(Loop(99).accelerator, store=tmp_path / "store", **EXACT) as run:
        assert (run.resumed.step, run.resumed.consistent) == (18, True)


def test_batches_without_epochs(tmp_path: Path) -> None:
    """Run a loop in which each pass over the loader is an epoch."""

    def passes(run: Any, loop: Loop, count: int, stop: int = 0) -> list[list[int]]:
        seen = []
        for _ in range(count):
            seen.append([])
            for ids, _ in run.batches(loop.loader):
                seen[-1].append(int(ids[0]))
                loop.optimizer.zero_grad()
                loop.model(ids).sum().backward()
                loop.optimizer.optimizer.step()
                if len(seen) * 100 + len(seen[-1]) == stop:
                    raise KeyboardInterrupt
        return seen

    def begun(folder: Path) -> tuple[Any, Loop]:
        forget_accelerators()
        loop = Loop()
        return attach_and_resume(loop.accelerator, store=folder / "store", **EXACT), loop

    run, loop = begun(tmp_path / "whole")
    with run:
        expected = passes(run, loop, 3)
    assert expected[0] != expected[1] != expected[2]
    run, loop = begun(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt), run:
        passes(run, loop, 3, stop=204)
    run, loop = begun(tmp_path / "run")
    with run:
        assert run.epoch == 1
        assert passes(run, loop, 2) == [expected[1][4:], expected[2]]


def test_a_loader_that_draws_from_its_own_generator(tmp_path: Path) -> None:
    """Make a loader as Accelerate does for several ranks."""
    stop = (1, 2)

    def trained(folder: Path, stop: tuple[int, int] | None) -> list[list[int]]:
        forget_accelerators()
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        data = torch.utils.data.TensorDataset(torch.arange(10.0)[:, None])
        generator = torch.Generator().manual_seed(5)
        loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True, generator=generator)
        model, loader, optimizer = accelerator.prepare(
            model, loader, torch.optim.Adam(model.parameters(), lr=0.1)
        )
        seen = []
        with attach_and_resume(accelerator, store=folder / "store", **EXACT) as run:
            for epoch in run.epochs(3):
                for number, (batch,) in enumerate(run.batches(loader)):
                    accelerator.backward(model(batch).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                    seen.append(batch[:, 0].tolist())
                    if (epoch, number) == stop:
                        raise KeyboardInterrupt
        return seen

    whole = trained(tmp_path / "whole", None)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "run", stop)
    assert trained(tmp_path / "run", None) == whole[stop[0] * 5 + stop[1] + 1 :]


class _Augmented(torch.utils.data.Dataset[Any]):
    """A dataset whose noise is drawn again each time."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return index + torch.rand(1)


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.long), 2])
def test_random_augmentation_comes_out_the_same(tmp_path: Path, workers: int) -> None:
    def trained(folder: Path, stop: int = 0) -> tuple[list[list[float]], bool]:
        forget_accelerators()
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        loader = torch.utils.data.DataLoader(_Augmented(), 4, shuffle=True, num_workers=workers)
        model = nn.Linear(1, 1)
        model, loader, optimizer = accelerator.prepare(model, loader, torch.optim.Adam(model.parameters()))
        seen = []
        with attach_and_resume(accelerator, store=folder / "store", **EXACT) as run:
            for _ in run.epochs(3):
                for batch in run.batches(loader):
                    if stop and len(seen) == stop:
                        raise KeyboardInterrupt
                    seen.append(batch[:, 0].tolist())
                    accelerator.backward(model(batch).sum())
                    optimizer.step()
                    optimizer.zero_grad()
            assert run.session.resumed is not None
            return seen, run.session.resumed.consistent

    whole, _ = trained(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "run", 8)
    assert trained(tmp_path / "run") == (whole[8:], True)
