"""Test partial recovery of optimizer state of another shape than its parameter, and what a recovery leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import scarctl
from scarctl import Session
from scarctl.errors import ScarError
from scarctl_adapters.torch import TorchAdapter

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

MAKES: dict[str, Make] = {
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "LBFGS": lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=3, history_size=3),
    "SOAPlike": lambda ps: _Matrices(ps, lr=0.01),
}
if hasattr(torch.optim, "Adafactor"):
    MAKES["Adafactor"] = lambda ps: torch.optim.Adafactor(ps, lr=0.01)


class _Matrices(torch.optim.Optimizer):
    """Keeps lists of matrices of a parameter's dimensions, as SOAP and Shampoo do, and a number per row."""

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state, grad = self.state[p], p.grad.reshape(p.shape[0], -1)
                if not state:
                    state["GG"] = [torch.zeros(n, n) for n in grad.shape]
                    state["rows"] = torch.zeros(p.shape[0])
                state["GG"][0] += grad @ grad.T
                state["GG"][1] += grad.T @ grad
                state["rows"] += grad.square().sum(1)
                p -= group["lr"] * p.grad


class Training:
    """A small model, and some steps of it."""

    def __init__(self, make: Make) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.optimizer = make(list(self.model.parameters()))
        self.data = torch.randn(16, 6)

    def step(self, count: int = 1) -> None:
        def loss() -> torch.Tensor:
            self.optimizer.zero_grad()
            value = self.model(self.data).square().mean()
            value.backward()
            return value

        for _ in range(count):
            if isinstance(self.optimizer, torch.optim.LBFGS):
                self.optimizer.step(loss)
            else:
                loss()
                self.optimizer.step()

    def session(self, folder: Path) -> Session:
        session = scarctl.attach(
            self.model,
            self.optimizer,
            store=folder / "run",
            settings=scarctl.Settings(daemon=False),
            partitioning=scarctl.Partitioning(shards=1, partition_bytes=64),
            interval=1000,
        )
        session.resume()
        return session


def _spoil(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.fill_(torch.nan)
    if isinstance(value, list | tuple):
        return type(value)(map(_spoil, value))
    return value


def _leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [leaf for item in items for leaf in _leaves(item)]


@pytest.mark.parametrize("name", sorted(MAKES))
def test_a_lost_parameter_comes_back_with_all_its_optimizer_has(name: str, tmp_path: Path) -> None:
    training = Training(MAKES[name])
    with training.session(tmp_path) as session:
        training.step(3)
        session.checkpoint(full=True, wait=True)
        training.step(2)
        with torch.no_grad():
            for parameter in training.model[0].parameters():
                parameter.fill_(torch.nan)
        for parameter, state in training.optimizer.state.items():
            if parameter is training.model[0].weight or parameter is training.model[0].bias:
                for key in state:
                    if key != "step":
                        state[key] = _spoil(state[key])
        report = session.recover("0.*")
        assert report.problems == ()
        everything = [
            *training.model.parameters(),
            *_leaves(dict(enumerate(training.optimizer.state.values()))),
        ]
        assert all(bool(torch.isfinite(tensor).all()) for tensor in everything)
        training.step(2)
        assert all(bool(torch.isfinite(p).all()) for p in training.model.parameters())


def test_a_lost_value_that_is_finite_is_replaced_too(tmp_path: Path) -> None:
    """Memory is restored with other numbers in it, and nothing shows that they are wrong."""
    training, wrong = Training(MAKES["SOAPlike"]), 12345.0
    with training.session(tmp_path) as session:
        training.step(3)
        session.checkpoint(full=True, wait=True)
        lost = [training.model[0].weight, training.model[0].bias]
        with torch.no_grad():
            for leaf in [*lost, *_leaves([training.optimizer.state[parameter] for parameter in lost])]:
                if leaf.is_floating_point() and leaf.dim():
                    leaf.fill_(wrong)
        assert session.recover("0.*").problems == ()
        for leaf in [*lost, *_leaves([training.optimizer.state[parameter] for parameter in lost])]:
            assert not bool((leaf == wrong).any())


def test_of_a_parameter_that_is_lost_in_part_only_lost_rows_of_row_statistics_change(tmp_path: Path) -> None:
    training = Training(MAKES["SOAPlike"])
    with training.session(tmp_path) as session:
        training.step(3)
        session.checkpoint(full=True, wait=True)
        weight = training.model[0].weight
        state = training.optimizer.state[weight]
        saved = state["rows"].clone()
        training.step(2)
        rows, matrices = state["rows"].clone(), [m.clone() for m in state["GG"]]
        assert not (rows == saved).any()
        report = session.recover("0.weight[0:2]")
        assert report.restored_partitions == 1
        assert torch.equal(state["rows"][:2], saved[:2])
        assert torch.equal(state["rows"][2:], rows[2:])
        # They belong to all rows, and were not lost: partly older ones would fit nothing.
        assert all(torch.equal(a, b) for a, b in zip(state["GG"], matrices, strict=True))
        with torch.no_grad():
            state["GG"][0][1] = torch.nan
        assert session.recover("0.weight[0:2]").problems == ()
        assert all(bool(torch.isfinite(m).all()) for m in state["GG"])
        assert not torch.equal(state["GG"][1], matrices[1])  # both are of one moment


def test_extras_that_are_not_finite_themselves_are_passed_over(tmp_path: Path) -> None:
    training = Training(MAKES["NAdam"])
    with training.session(tmp_path) as session:
        training.step(3)
        session.checkpoint(full=True, wait=True)
        product = training.optimizer.state[training.model[0].weight]["mu_product"]
        good = product.clone()
        training.step(1)
        product.fill_(torch.nan)
        with torch.no_grad():
            training.model[0].weight.fill_(torch.nan)
        with pytest.raises(ScarError, match="not finite"):
            session.checkpoint(wait=True)
        assert session.recover("0.weight").problems == ()
        assert torch.equal(product, good) or torch.equal(
            training.optimizer.state[training.model[0].weight]["mu_product"], good
        )


def test_what_an_adapter_cannot_put_back_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter that does not support it works as before, and the report says what is left."""
    monkeypatch.delattr(TorchAdapter, "restore_lost")
    training = Training(MAKES["NAdam"])
    with training.session(tmp_path) as session:
        training.step(3)
        session.checkpoint(full=True, wait=True)
        with torch.no_grad():
            training.model[0].weight.fill_(torch.nan)
        training.optimizer.state[training.model[0].weight]["mu_product"].fill_(torch.nan)
        report = session.recover("0.weight")
        assert bool(torch.isfinite(training.model[0].weight).all())
        [problem] = report.problems
        assert "mu_product" in problem
        assert "saved at step 3" in problem
        assert report.to_json()["problems"] == [problem]
        rolled = session.recover("all", mode="rollback")
        assert rolled.problems == ()


@pytest.mark.parametrize("moment", [True, False])
def test_a_store_that_is_away_does_not_stop_a_recovery(tmp_path: Path, moment: bool) -> None:
    """moment: memory has the extras, too. Otherwise the report says what they were needed for."""
    training = Training(MAKES["SOAPlike"])
    with training.session(tmp_path) as session:
        training.step(3)
        session.checkpoint(full=True, wait=True)
        with torch.no_grad():
            training.model[0].weight.fill_(torch.nan)
        if not moment:
            for path in session._started().arena.folder.glob("extras-*"):
                path.unlink()
        (tmp_path / "run").rename(tmp_path / "away")
        report = session.recover("0.weight")
        (tmp_path / "away").rename(tmp_path / "run")
        assert bool(torch.isfinite(training.model[0].weight).all())
        assert any("not restored" in problem for problem in report.problems) != moment
