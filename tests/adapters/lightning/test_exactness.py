"""Test that a fit stopped at any point and run again ends bit for bit like one that was never interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.support.lazy import Lazy

if TYPE_CHECKING:
    from tests.adapters.lightning import fits
else:
    fits = Lazy("tests.adapters.lightning.fits")

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
