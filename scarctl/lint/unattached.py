"""Warn when a model is trained by optimizers that were not attached, and no attached one ever steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from scarctl.state.caveats import Caveats

_STEPS = 3
"""Steps of other optimizers before the first iteration has ended, after which they are reported."""


class Unattached:
    """Counts steps of other optimizers until the first iteration ends. It costs later steps nothing."""

    def __init__(
        self, parameters: Iterable[torch.Tensor], attached: Collection[int], caveats: Caveats
    ) -> None:
        """parameters: those of the model. attached: ids of the optimizers that `attach` was given, or found in them."""
        self._parameters = set(map(id, parameters))
        self._attached = attached
        self._caveats = caveats
        self._steps = 0
        self._handle: Any = register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: Optimizer, *_: object) -> None:
        if id(optimizer) in self._attached:
            return
        if not any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"]):
            return
        self._steps += 1
        if self._steps == _STEPS:
            self._caveats.say(
                "no-step",
                f"an optimizer {type(optimizer).__name__} that attach was not given trains the model, and no attached "
                "one has stepped: nothing is saved. Give attach every optimizer, or pass hooks='off' and call "
                "session.step() at the end of every iteration",
            )

    def stepped(self) -> None:
        """Note that an iteration has ended."""
        if self._handle is not None:
            self.end()
            self._caveats.withdraw("no-step")

    def end(self) -> None:
        """Remove the hook."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
