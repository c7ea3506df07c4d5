"""Test a DataLoader that is read next to `session.batches`, without the session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import scarctl
from scarctl.config import grouped
from scarctl.session.loader import OtherLoaders, iterators
from tests.loops.rig import Digits, net, train

STEPS = 8


def forever() -> Iterator[Any]:
    while True:
        yield from DataLoader(Digits(28), batch_size=4, shuffle=True)


def run(store: Path, kind: str) -> scarctl.Session:
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = scarctl.attach(model, optimizer, store=store, **grouped(daemon=False))
    session.resume()
    others = session.batches(DataLoader(Digits(40), batch_size=4)) if kind == "ours" else forever()
    if kind == "begun":  # a validation before the first epoch that was left early, and whose iterator is kept
        next(others)
    for x, y in session.batches(DataLoader(Digits(4 * STEPS), batch_size=4)):
        more = next(others)[0] if kind in ("read", "ours") else 0
        if kind == "validated":
            assert len(list(DataLoader(Digits(8), batch_size=4))) == 2
        train(model, optimizer, (x + more, y))
    return session


@pytest.mark.parametrize(
    ("kind", "said"), [("read", True), ("ours", False), ("validated", False), ("begun", False)]
)
def test_only_one_that_every_iteration_reads_is_said(tmp_path: Path, kind: str, said: bool) -> None:
    session = run(tmp_path / "store", kind)
    assert ("other-loader" in {caveat.kind for caveat in session.caveats}) is said
    session.close()


def test_an_iterator_that_advances_between_two_steps_is_found_once() -> None:
    looks, loader = OtherLoaders(), DataLoader(Digits(40), batch_size=4)
    mine, other = iter(loader), iter(loader)
    assert {id(mine), id(other)} <= {id(one) for one in iterators()}
    found = []
    for head in range(8):
        next(other)
        found += [looks.advance({id(mine)}, head), looks.advance({id(mine)}, head)]
    assert found == [False] * 6 + [True] + [False] * 9
