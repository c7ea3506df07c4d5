"""Test that a stopped loop with Accelerate continues bit for bit like an uninterrupted one, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import nn

from scarctl.errors import UsageError
from scarctl_adapters.accelerate import attach_and_resume
from tests.adapters.accelerate_runs import EXACT, Loop, forget_accelerators, go
from tests.support.training import differing

# A resumed process may begin by stepping a schedule at the end of an epoch.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    forget_accelerators()
    yield
    forget_accelerators()


def test_beside_scarctl_a_run_is_what_it_is_without(tmp_path: Path) -> None:
    whole, _ = go()
    state, resumed = go(tmp_path / "store")
    assert (resumed.step, resumed.consistent) == (0, True)
    assert differing(state, whole) == []


def test_a_run_that_is_done_trains_nothing_and_a_longer_one_goes_on(tmp_path: Path) -> None:
    go(tmp_path / "store")
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


class _Augmented(torch.utils.data.Dataset[Any]):
    """A dataset whose noise is drawn again each time."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return index + torch.rand(1)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"dataset": _Augmented()}, marks=pytest.mark.long),
        {"dataset": _Augmented(), "num_workers": 2},
        {"dataset": torch.arange(20.0)[:, None], "generator": 5},  # as Accelerate does for several ranks
    ],
    ids=["augmented", "by workers", "own generator"],
)
def test_random_batches_come_out_the_same(tmp_path: Path, options: dict[str, Any]) -> None:
    def trained(folder: Path, stop: int = 0) -> tuple[list[list[float]], bool]:
        forget_accelerators()
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        made = dict(options)
        if "generator" in options:
            made["generator"] = torch.Generator().manual_seed(options["generator"])
        loader = torch.utils.data.DataLoader(batch_size=4, shuffle=True, **made)
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


def test_nothing_prepared(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(UsageError, match=r"has prepared no model .call accelerator.prepare"):
        attach_and_resume(accelerator, store=tmp_path / "store")
    accelerator.prepare(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="has prepared no optimizer"):
        attach_and_resume(accelerator, store=tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fractoin": 1}, "no option 'fractoin'"),
        ({"optimizer": 1}, "optimizer comes from the Accelerator"),
        ({"extras": {"accelerate": {}}}, "the extra 'accelerate' is scarctl's own"),
    ],
)
def test_options(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        attach_and_resume(Loop().accelerator, store=tmp_path / "store", **options)
    assert not (tmp_path / "store").exists()


def test_what_is_no_accelerator(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="accelerator is a Linear"):
        attach_and_resume(nn.Linear(2, 2), store=tmp_path / "store")


@pytest.mark.parametrize(
    ("kind", "plugin", "said"),
    [
        (DistributedType.DEEPSPEED, None, "DEEPSPEED keeps parameters"),
        (DistributedType.MEGATRON_LM, None, "MEGATRON_LM keeps parameters"),
        (DistributedType.XLA, None, "TPUs are not supported"),
        (DistributedType.FSDP, SimpleNamespace(fsdp_version=1), "FSDP of version 1 flattens"),
    ],
)
def test_strategies(tmp_path: Path, kind: DistributedType, plugin: Any, said: str) -> None:
    accelerator = Loop().accelerator
    # The launcher would set this variable.
    shared = AcceleratorState._shared_state
    shared["distributed_type"], shared["fsdp_plugin"] = kind, plugin
    with pytest.raises(UsageError, match=said):
        attach_and_resume(accelerator, store=tmp_path / "store")


def test_a_registered_object_that_no_checkpoint_can_hold(tmp_path: Path) -> None:
    loop = Loop()

    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"lock": object()}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    loop.accelerator.register_for_checkpointing(Odd())
    with pytest.raises(UsageError, match="the registered Odd has a state that cannot be saved"):
        attach_and_resume(loop.accelerator, store=tmp_path / "store")
