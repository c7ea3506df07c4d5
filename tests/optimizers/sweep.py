"""Train with any optimizer, and find the outcome of a run that is stopped, resumed and continued.

It is compared bit for bit, weights and loss, with a run that was never stopped. The outcome is what scarctl reported
before: nothing (then both have to be equal), a caveat, or a refusal.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import scarctl
from scarctl.config import grouped
from scarctl.errors import ScarError

STEPS, STOP = 12, 7
EXACT, SAID, REFUSED, FAILED, SILENT, BROKEN = "exact", "said", "refused", "failed", "silent", "broken"
"""FAILED: errors are logged and counted, and nothing is saved afterwards. BROKEN: it does not run without scarctl."""


@dataclass(frozen=True)
class Case:
    """One configuration of one optimizer."""

    name: str
    make: Callable[[nn.Module], torch.optim.Optimizer]
    closure: bool = False
    sparse: bool = False
    matrices: bool = False
    """Only parameters of two dimensions, as some optimizers require."""
    create_graph: bool = False
    twice: bool = False
    """Its step needs gradients, and computes more of them."""
    wide: int = 1
    """Factor by which matrices are enlarged."""
    value: bool = False
    """Its closure returns the loss, after the backward pass."""
    fused: bool = False
    """It steps within the backward pass, in `fused_backward`."""


class Net(nn.Module):
    """A model with parameters of one to four dimensions and a changing buffer, or one with sparse gradients."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.sparse, self.matrices = case.sparse, case.matrices
        if case.sparse:
            self.table = nn.EmbeddingBag(12, 4, sparse=True)
        elif case.matrices:
            self.first, self.second = (
                nn.Linear(8 * case.wide, 6 * case.wide, bias=False),
                nn.Linear(6 * case.wide, 4, bias=False),
            )
        else:
            self.conv, self.norm, self.out = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(16, 4)

    def forward(self, step: int) -> torch.Tensor:
        if self.sparse:
            return self.table(torch.randint(0, 12, (5, 3))).square().mean()
        if self.matrices:
            x = torch.randn(5, self.first.in_features)
            return (self.second(torch.tanh(self.first(x))) - 1).square().mean()
        images = torch.randn(5, 1, 4, 4)
        return (self.out(self.norm(self.conv(images)).flatten(1)) - 1).square().mean()


class Run:
    """The objects of one process."""

    def __init__(self, case: Case, store: Path | None, **options: Any) -> None:
        torch.manual_seed(1)
        np.random.seed(2)
        random.seed(3)
        self.case = case
        self.die: Callable[[], None] = lambda: None
        """Called when an iteration has its gradients, within its step if the step takes a closure."""
        self.model = Net(case)
        self.optimizer = case.make(self.model)
        self.session = (
            scarctl.attach(
                self.model,
                self.optimizer,
                store=store,
                interval=1,
                hooks="off" if case.fused else "auto",
                **grouped(daemon=False, **options),
            )
            if store is not None
            else None
        )

    def train(self, first: int, last: int) -> None:
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()
        for step in range(first, last):

            def compute(step: int = step) -> torch.Tensor:
                self.optimizer.zero_grad()
                loss = self.model(step)
                loss.backward(create_graph=self.case.create_graph)
                self.die()
                return loss  # type: ignore[no-any-return]

            if self.case.fused:
                self.optimizer.fused_backward(self.model(step), lr=0.01)  # type: ignore[attr-defined]
                self.die()
                if self.session is not None:
                    self.session.step()
                continue
            if self.case.twice:
                compute()
            if self.case.value:
                loss = float(compute())
                self.optimizer.step(lambda loss=loss: loss)  # type: ignore[misc]
            elif self.case.closure:
                self.optimizer.step(compute)
            else:
                compute()
                self.optimizer.step()

    def digest(self) -> str:
        whole = hashlib.sha256()
        for tensor in self.model.state_dict().values():
            whole.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return whole.hexdigest()


def outcome(case: Case, folder: Path) -> tuple[str, str]:
    """Return the outcome and its reason."""
    try:
        whole = Run(case, None)
        whole.train(0, STEPS)
    except Exception as error:
        return BROKEN, f"without scarctl: {type(error).__name__}: {error}"
    try:
        before = Run(case, folder / "store")
    except ScarError as error:
        return REFUSED, f"attach: {error}"
    assert before.session is not None
    with contextlib.ExitStack() as closing:
        closing.callback(before.session.close)
        before.session.resume()
        try:
            before.train(0, STOP)
        except ScarError as error:
            return REFUSED, f"step {before.session.head_step}: {error}"
        if before.session.stats.errors:
            return FAILED, f"errors while saving: {before.session.stats.last_error}"
    after = Run(case, folder / "store")
    assert after.session is not None
    with after.session:
        try:
            resumed = after.session.resume()
        except ScarError as error:
            return SILENT, f"saved, and cannot be resumed: {error}"
        if resumed.step != STOP:
            return SILENT, f"resumed {resumed.step}"
        after.train(resumed.step, STEPS)
        same = after.digest() == whole.digest()
        if resumed.consistent:
            if same:
                return EXACT, ""
            again = Run(case, None)
            again.train(0, STEPS)
            if again.digest() != whole.digest():
                return BROKEN, "two runs without scarctl differ"
            return SILENT, "exact, and it is not"
        return SAID, f"{'same' if same else 'differs'}: {'; '.join(resumed.reasons)}"


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Use one thread, and no logs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.getLogger("scarctl").setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logging.getLogger("scarctl").setLevel(logging.NOTSET)
        torch.set_num_threads(threads)
        os.environ.pop("SCARCTL_STORE", None)
