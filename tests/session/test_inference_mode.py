"""Test that sessions save and recover within `torch.inference_mode`, and work as usual afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import scarctl
from tests.support.training import differing

pytestmark = pytest.mark.usefixtures("both_savers")


class Late(nn.Module):
    """A model with buffers, and a layer that no gradient has reached yet."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.late = nn.Linear(4, 4)


class Loop:
    def __init__(self, store: Path) -> None:
        torch.manual_seed(0)
        self.model = Late()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.session = scarctl.attach(
            self.model,
            self.optimizer,
            store=store,
            interval=2,
            settings=scarctl.Settings(on_error="raise", validate=True),
        )

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model.body(torch.randn(8, 3)).square().sum().backward()
            self.optimizer.step()

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
        return self.model.state_dict(), self.optimizer.state_dict()["state"]


CALLS: list[Callable[[scarctl.Session], object]] = [
    lambda session: session.checkpoint(full=True, wait=True),
    lambda session: session.recover("late.*"),
]


@pytest.mark.parametrize("call", CALLS, ids=["full", "recover"])
def test_a_call_in_inference_mode(tmp_path: Path, call: Callable[[scarctl.Session], object]) -> None:
    loop = Loop(tmp_path / "store")
    loop.train(3)
    loop.session.checkpoint(full=True, wait=True)
    bias = loop.model.body[0].bias
    bias.data = bias.data.clone()  # as if an average were tried: all values are requested again
    with torch.inference_mode():
        call(loop.session)
        assert torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
    loop.train(5)
    loop.session.close()
    assert loop.session.stats.errors == 0
    again = Loop(tmp_path / "store")
    resumed = again.session.resume()
    assert resumed.consistent
    again.session.close()
    values, slots = loop.state()
    assert differing(values, again.state()[0]) == []
    # Those of the layer that never stepped are zeros by now.
    torch.testing.assert_close({k: again.state()[1][k] for k in slots}, slots, rtol=0, atol=0)


def test_resume_in_inference_mode(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "store")
    loop.train(3)
    loop.session.close()
    again = Loop(tmp_path / "store")
    with torch.inference_mode():
        assert again.session.resume().consistent
    again.train(4)
    again.session.close()
    assert again.session.stats.errors == 0
    assert all(p.requires_grad and not p.is_inference() for p in again.model.parameters())
