"""Test that a fit stopped at any point and run again ends bit for bit like one that was never interrupted."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from scarctl.state.torch_dtypes import plain
from tests.support.lazy import Lazy
from tests.support.process import Forked, Tell

if TYPE_CHECKING:
    from lightning.pytorch.plugins import precision as plugins

    from tests.adapters.lightning import fits
else:
    fits = Lazy("tests.adapters.lightning.fits")
    plugins = Lazy("lightning.pytorch.plugins.precision")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

SOME: list[fits.Point] = [("validation", 0, 1), ("epoch_end", 0, 0), ("train", 1, 4)]


def check(
    folder: Path,
    kind: type[fits.Net],
    ends: Iterable[fits.Point],
    data: Callable[[], Any] = lambda: fits.loader(),
    **options: Any,
) -> None:
    """Interrupt a fit at each of these points, run it again, and compare all that it leaves."""
    whole, trainer = fits.fit(kind, None, train=data(), **options)
    expected, wrong = fits.outcome(whole, trainer), {}
    for number, point in enumerate(ends):
        store = folder / str(number)
        with pytest.raises(fits.Interrupted):
            fits.fit(kind, store, point, train=data(), **options)
        net, trainer = fits.fit(kind, store, train=data(), **options)
        wrong[point] = fits.differing(fits.outcome(net, trainer), expected)
        if net.seen != whole.seen[len(whole.seen) - len(net.seen) :]:
            wrong[point].append("data")
    assert {point: names for point, names in wrong.items() if names} == {}


@pytest.mark.long
def test_wherever_it_was_interrupted(tmp_path: Path) -> None:
    """Fit with accumulation over two batches, and a validation after every third."""
    check(tmp_path, fits.Net, fits.points(), val_check_interval=0.5)


@pytest.mark.parametrize("kind", ["PlateauNet", "ManualNet"])
def test_other_schedules_and_optimizers(kind: str, tmp_path: Path) -> None:
    check(tmp_path, getattr(fits, kind), [("validation", 0, 1), ("batch_end", 1, 5)])


class Stream(IterableDataset[Any]):
    """A dataset of unknown length."""

    def __iter__(self) -> Iterator[Any]:
        for number in torch.randperm(22):
            yield (number * 7 % 64,)


class Resumable:
    """A loader with a state, which continues and reads no batch again."""

    read = 0

    def __init__(self) -> None:
        self.order: Any = None
        self.position = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        order = self.order = torch.randperm(24) if self.order is None else self.order
        while order is self.order:
            start = 4 * self.position
            self.position += 1
            Resumable.read += 1
            if self.position == 6:
                self.order, self.position = None, 0
            yield [order[start : start + 4] * 7 % 64]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.position = state["order"], state["position"]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(lambda: fits.loader(num_workers=1, persistent_workers=True), marks=pytest.mark.long),
        lambda: fits.loader(generator=torch.Generator().manual_seed(5)),
        pytest.param(lambda: DataLoader(Stream(), batch_size=4), marks=pytest.mark.long),
        Resumable,
    ],
    ids=["workers", "generator", "stream", "stateful"],
)
def test_kinds_of_data(data: Callable[[], Any], tmp_path: Path) -> None:
    check(tmp_path, fits.Net, [("train", 0, 3), ("train", 1, 4)], data)


def test_a_loader_with_a_state_reads_nothing_again(tmp_path: Path) -> None:
    with pytest.raises(fits.Interrupted):
        fits.fit(fits.Net, tmp_path / "store", ("train", 0, 5), train=Resumable())
    Resumable.read = 0
    fits.fit(fits.Net, tmp_path / "store", train=Resumable())
    assert Resumable.read == 12 - 4


@pytest.mark.parametrize(
    ("ends", "options"),
    [
        (SOME, {"limit_train_batches": 5, "accumulate_grad_batches": 3}),
        ([("train", 0, 5), ("epoch_end", 1, 0)], {"max_steps": 5, "max_epochs": -1}),
        ([("train", 1, 3)], {"reload_dataloaders_every_n_epochs": 1, "precision": "bf16-mixed"}),
        ([("train", 1, 3)], {"check_val_every_n_epoch": None, "val_check_interval": 4}),
    ],
    ids=["limit", "steps", "reload", "validation-by-steps"],
)
@pytest.mark.long
def test_options_of_the_trainer(ends: list[fits.Point], options: dict[str, Any], tmp_path: Path) -> None:
    check(tmp_path, fits.Net, ends, **options)


@pytest.mark.leaves_arena
def test_what_lightning_does_with_sigterm_it_still_does(tmp_path: Path) -> None:
    """The fit ends its batch and raises, and the newest step is in the store."""
    store = tmp_path / "store"

    def train(tell: Tell) -> None:
        def then(_: fits.Point) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

        try:
            fits.fit(fits.Net, store, ("train", 1, 1), then)
        except BaseException as error:
            tell(type(error).__name__)
            raise
        tell("returned")

    with Forked(train) as child:
        child.expect("SIGTERMException", 60)
        assert child.wait(60) == 1
    whole, trainer = fits.fit(fits.Net, None)
    expected = fits.outcome(whole, trainer)
    net, trainer = fits.fit(fits.Net, store)
    assert trainer.callbacks[0].resumed.consistent
    assert len(net.seen) == 4
    assert fits.differing(fits.outcome(net, trainer), expected) == []


def scaled() -> dict[str, Any]:
    """Use float16 on the CPU, where Lightning's precision="16-mixed" falls back to bfloat16. The scale doubles often,
    and some steps overflow and are skipped.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
    return {"plugins": [plugins.MixedPrecision("16-mixed", device="cpu", scaler=scaler)]}


def state_of(net: fits.Net, trainer: Any) -> dict[str, Any]:
    found = fits.outcome(net, trainer) if net.embed.weight.dtype == torch.float32 else {}
    weights = {f"{name} itself": str(plain(value)) for name, value in net.state_dict().items()}
    return {**found, **weights, "scaler": str(trainer.precision_plugin.state_dict())}


@pytest.mark.parametrize("precision", ["scaled", "bf16-true"])
def test_a_fit_goes_on_exactly(precision: str, tmp_path: Path) -> None:
    def arguments() -> dict[str, Any]:
        return scaled() if precision == "scaled" else {"precision": precision}

    whole = state_of(*fits.fit(fits.Net, None, accumulate_grad_batches=1, **arguments()))
    with pytest.raises(fits.Interrupted):
        fits.fit(fits.Net, tmp_path / "store", ("train", 1, 3), accumulate_grad_batches=1, **arguments())
    net, trainer = fits.fit(fits.Net, tmp_path / "store", accumulate_grad_batches=1, seed=9, **arguments())
    resumed = trainer.callbacks[0].resumed
    assert resumed.consistent
    assert 0 < resumed.step <= 9
    assert fits.differing(state_of(net, trainer), whole) == []
    if precision == "scaled":
        assert resumed.step < 9, "no step has overflowed"
