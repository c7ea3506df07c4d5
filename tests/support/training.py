"""Provide small real training loops for tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import scarctl
from scarctl.config import grouped


class Net(nn.Module):
    """A model with an embedding, batch norm and dropout: sparse changes, buffers, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.25)
        self.out = nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(self.norm(self.embed(ids))))  # type: ignore[no-any-return]


class Loop:
    """A loop with Adam and a scheduler whose every random choice comes from torch's global generator."""

    def __init__(
        self, store: Path | str, *, seed: int = 0, hooks: Literal["auto", "begin"] = "begin", **options: Any
    ) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=50)
        self.position = {"batches": 0}
        self._steps = hooks == "begin"
        settings: dict[str, Any] = {"fraction": 0.25, "interval": 2, "partition_bytes": 256, **options}
        self.session = scarctl.attach(
            self.model,
            self.optimizer,
            store=store,
            schedulers=self.scheduler,
            extras={"position": self.position},
            hooks=hooks,
            **grouped(**settings),
        )

    def train(self, steps: int, *, settle: bool = False) -> None:
        """Take some steps. `settle`: wait after each for the store, as a loop with longer steps would."""
        for _ in range(steps):
            ids = torch.randint(0, 64, (16,))
            self.position["batches"] += 1
            loss = self.model(ids).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            if self._steps:
                self.session.step()
            if settle:
                self.session._saving.finish()
                drained([self.session])

    def state(self) -> dict[str, torch.Tensor]:
        """Return private copies of parameters, buffers and moments, by full name."""
        return {
            f"{group.name}/{slot}" if slot else group.name: tensor.detach().clone()
            for group in self.session.adapter.groups()
            for slot, tensor in group.tensors.items()
        }


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that are not bit for bit the same."""
    assert a.keys() == b.keys()
    return [name for name in a if a[name].numpy().tobytes() != b[name].numpy().tobytes()]


def drained(sessions: Iterable[scarctl.Session]) -> None:
    """Wait until all copies are durable. Sessions must have taken a step."""
    for session in sessions:
        assert session._engine is not None
        assert drain(session)


def drain(session: scarctl.Session, seconds: float = 30.0) -> bool:
    """Wait until all copies are durable; return whether they are. True before the first step."""
    return session._engine is None or session._engine.saver.drain(seconds)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return copies of a model's tensors, and of Adam's slots as far as they exist."""
    slots = {
        f"{name}/{slot}": optimizer.state[parameter][slot].clone()
        for name, parameter in model.named_parameters()
        for slot in ("exp_avg", "exp_avg_sq")
        if slot in optimizer.state[parameter]
    }
    return slots | {name: tensor.clone() for name, tensor in model.state_dict().items()}


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return copies of tensors, slots, counts, learning rates and random numbers, to be compared bit for bit."""
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for number, slots in optimizer.state_dict()["state"].items():
        state |= {f"{number}.{key}": torch.as_tensor(value).clone() for key, value in slots.items()}
    state["lr"] = torch.tensor([group["lr"] for group in optimizer.param_groups], dtype=torch.float64)
    state["random numbers"] = torch.get_rng_state()
    return state
