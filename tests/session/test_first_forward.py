"""Test that the first forward after a resume is inspected, without touching other objects in the process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

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


def test_a_forward_within_transformations_is_compared_and_disturbs_nothing(tmp_path: Path) -> None:
    """Gradients of each sample by torch.func, under dropout: no tensor in there can be read like others."""
    data = torch.rand(9, 4, 8, generator=torch.Generator().manual_seed(1))

    def trained(store: str, until: int) -> tuple[list[float], scarctl.Session]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        session = scarctl.attach(model, optimizer, store=tmp_path / store, **grouped(daemon=False))
        session.resume()

        def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return functional_call(model, parameters, (x,)).square().mean()

        each = vmap(grad(loss), in_dims=(None, 0), randomness="different")
        for x in session.batches(data):
            found = each(dict(model.named_parameters()), x)
            for name, parameter in model.named_parameters():
                parameter.grad = found[name].mean(0)
            optimizer.step()
            if session.head_step == until:
                session.checkpoint(full=True)
                break
        session.close()
        assert session.stats.last_error == ""
        return [value for p in model.parameters() for value in p.detach().ravel().tolist()], session

    undisturbed, _ = trained("undisturbed", 9)
    trained("store", 4)
    values, session = trained("store", 9)
    assert session.resumed is not None
    assert (session.resumed.step, session.resumed.reasons) == (4, ())
    assert values == undisturbed
