"""Test that the first forward after a resume is inspected, without touching other objects in the process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import scarctl
from scarctl.config import grouped


class Lazy:
    """An object that acts when it is asked for its class, as torch's deprecated names do."""

    asked = False

    def __init__(self) -> None:
        self.tracked: list[int] = []

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        Lazy.asked = True
        raise RuntimeError("nobody needs to know")


def test_no_object_is_asked_for_its_class(tmp_path: Path) -> None:
    kept = Lazy()
    for steps in (5, 1):
        torch.manual_seed(steps)
        model = nn.Linear(64, 32)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        settings = grouped(daemon=False)
        with scarctl.attach(model, optimizer, store=tmp_path / "store", **settings) as session:
            session.resume()
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.randn(8, 64)).square().mean().backward()
                optimizer.step()
    assert not Lazy.asked
    assert kept.tracked == []


def test_only_a_forward_with_gradients_begins_the_next_iteration(tmp_path: Path) -> None:
    """After it the loop writes no weights. After another, such as one that measures statistics, it still may."""
    model = nn.Linear(64, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with scarctl.attach(model, optimizer, store=tmp_path / "store", **grouped(daemon=False)) as session:
        for gradients in (True, False, True):
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            with torch.set_grad_enabled(gradients):
                model(torch.randn(8, 64))
            moment = session._saving.moment
            assert moment is not None
            assert (moment.begun is not None) is gradients
