"""Test that the last given batch is compared after a resume, whatever its content, at little cost."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import scarctl
from scarctl.config import grouped
from scarctl.session.loader import Given


class Counted(list[Any]):
    """A list that counts how many of its items are read."""

    read = 0

    def __iter__(self) -> Any:
        for item in super().__iter__():
            Counted.read += 1
            yield item


def ragged(items: list[int]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.full((item + 1, 4), float(item)) for item in items])


def run(store: Path, loader: Any, steps: int) -> tuple[scarctl.Session, list[weakref.ref[torch.Tensor]]]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = scarctl.attach(model, optimizer, store=store, interval=1, **grouped(daemon=False))
    session.resume()
    seen = []
    for batch in session.batches(loader):
        optimizer.zero_grad()
        out = model(batch)
        (out.values() if out.is_nested else out).square().sum().backward()
        optimizer.step()
        seen.append(weakref.ref(batch))
        if session.head_step == steps:
            break
    return session, seen


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_saved_and_resumed(tmp_path: Path) -> None:
    loader = DataLoader(range(12), batch_size=2, collate_fn=ragged)  # type: ignore[arg-type]
    session, _ = run(tmp_path / "s", loader, 3)
    session.close()
    session, _ = run(tmp_path / "s", loader, 6)
    assert session.resumed is not None
    assert session.resumed.step == 3
    assert session.resumed.exact
    session.close()


def test_what_cannot_be_read_is_not_compared() -> None:
    class Odd(torch.Tensor):
        def reshape(self, *shape: Any) -> Any:
            raise NotImplementedError

    assert Given(torch.ones(3)).value() is not None
    assert Given(torch.ones(3).as_subclass(Odd)).value() is None


def test_of_a_batch_of_many_values_only_some_are_read() -> None:
    Counted.read = 0
    many = Counted([Counted(range(512)) for _ in range(256)])
    digest = Given(many).value()
    assert Counted.read < 2000
    assert digest != Given([*many, many[0]]).value()
    assert digest != Given([*many[:1], [1] * 512, *many[2:]]).value()
    Counted.read = 0
    Given(Counted([object()] * 100_000))
    assert Counted.read < 2000


def test_batches_of_a_loader_that_is_not_compared_are_not_kept(tmp_path: Path) -> None:
    kept: list[int] = []
    seen: list[weakref.ref[torch.Tensor]] = []

    def stream() -> Any:
        for _ in range(5):
            kept.append(sum(known() is not None for known in seen))
            batch = torch.ones(2, 4)
            seen.append(weakref.ref(batch))
            yield batch
            del batch

    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with scarctl.attach(
        model, optimizer, store=tmp_path / "s", interval=100, **grouped(daemon=False)
    ) as session:
        session.resume()
        for batch in session.batches(stream()):
            del batch
    assert max(kept) == 0
