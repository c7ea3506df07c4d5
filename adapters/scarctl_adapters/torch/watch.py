"""Warn when a model is trained by other means than the steps of the attached optimizers.

torch's global hook shows the steps of other optimizers. Parameters that change without a step, by hand or within the
backward pass, are found by comparing them between backward passes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from scarctl.state.caveats import Caveats
from scarctl_adapters.torch.carried import Carried
from scarctl_adapters.torch.homes import Home
from scarctl_adapters.torch.outside import Outside
from scarctl_adapters.torch.packing import is_plain_tensor
from scarctl_adapters.torch.sharding import params_of
from scarctl_adapters.torch.stepping import running, uncompiled

SLACK = 20
"""Backward passes beyond the usual number between two steps, after which parameters are compared. Five times as many
steps of other optimizers, without one of the attached ones, give a warning."""
FIRST = 4
"""Number of first iterations in which gradients and other modules are checked."""
_LOOKED_AT = 8
"""Number of parameters that are compared: the smallest ones."""
_LARGEST = 1 << 16
"""Largest number of elements of such a parameter."""
_ALIKE = 3
"""Steps after which two of the parameters are enough to count backward passes."""
_backward: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the number of the backward pass that runs in this thread, -1 without one."""
_HINT = "pass hooks='off' to attach, and call session.step() at the end of every iteration"


class Watch:
    """See `KnowsCaveats`."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        homes: Sequence[Home],
        caveats: Caveats,
        saved: Iterable[Any] = (),
    ) -> None:
        """saved: other objects whose state is also saved."""
        self._model, self._caveats = model, caveats
        self._ours = {id(o) for o in optimizers} | {id(home.optimizer) for home in homes}
        self._given = {id(o) for o in optimizers}
        self._last = id(optimizers[-1]) if optimizers else 0
        """The optimizer whose step ends an iteration."""
        self._ended_in = -1
        """The backward pass in which the newest iteration has ended; -1: in none, or not one of the first."""
        self._trained = {id(p) for o in optimizers for p in params_of(o)}
        self._strangers: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        """Other optimizers: whether they have parameters of the model."""
        self._foreign = 0
        """Steps of other optimizers since one of the attached ones."""
        self._steps = 0
        trainable = [
            p
            for p in {
                id(p): p for p in [*model.parameters(), *(p for o in optimizers for p in params_of(o))]
            }.values()
            if p.requires_grad and p.is_leaf and is_plain_tensor(p) and 0 < p.numel() <= _LARGEST
        ]
        self._looked_at = sorted(trainable, key=lambda p: p.numel())[:_LOOKED_AT]
        self._backwards = [0] * len(self._looked_at)
        """Backward passes since the last step, by parameter."""
        self._usual = 0
        """Most backward passes between two steps so far."""
        self._alike = 0
        """Consecutive steps before which all compared parameters had equal counts."""
        self._seen: list[torch.Tensor] = []
        self._handles: list[Any] = [register_optimizer_step_post_hook(self._after)]
        self._counting: dict[int, Any] = {}
        """Handles of the hooks that count, by number of their parameters."""
        self._count(range(len(self._looked_at)))
        self._carried = Carried(self._looked_at, caveats)
        self.outside = Outside(model, [p for o in optimizers for p in params_of(o)], saved, caveats)

    def _count(self, numbers: Iterable[int]) -> None:
        """Count the backward passes of only these parameters. A parameter that is frozen now cannot have a hook."""
        wanted = set(numbers)
        for number in sorted(wanted - self._counting.keys()):
            if not self._looked_at[number].requires_grad:
                continue
            hook = self._looked_at[number].register_post_accumulate_grad_hook(self._hook(number))  # type: ignore[no-untyped-call]
            self._counting[number] = hook
        for number in self._counting.keys() - wanted:
            self._counting.pop(number).remove()

    def step_begins(self) -> None:
        """Note that an optimizer is about to step."""
        if self._steps < FIRST:
            self.outside.following.step_begins()

    def stepped(self) -> None:
        self._steps += 1
        self._foreign = 0
        backwards = self._backwards
        if self._alike > _ALIKE and backwards[0] == backwards[-1] == self._usual:
            backwards[0] = backwards[-1] = 0  # as in `_forget_passes`: all other counts are 0
        elif self._looked_at:
            self._forget_passes()
        if self._seen:
            self._seen = []
        self._caveats.withdraw("no-step")
        self._ended_in = -1
        if self._steps <= FIRST:
            self._ended_in = _backward()
            self._carried.stepped()
            self.outside.stepped()

    def _forget_passes(self) -> None:
        """Restart counting. If all parameters have equal counts, two are enough, until one of them has no pass."""
        backwards = self._backwards
        counts = [backwards[number] for number in self._counting]
        least, most = min(counts, default=0), max(counts, default=0)
        if most > self._usual:
            self._usual = most
        self._backwards = [0] * len(backwards)
        self._alike = self._alike + 1 if least and least == most else 0
        if self._alike == _ALIKE:
            self._count((0, len(self._looked_at) - 1))
        elif not self._alike and len(self._counting) < len(self._looked_at):
            self._count(range(len(self._looked_at)))

    def look(self) -> None:
        if self._handles and self._seen and max(self._backwards, default=0) > self._usual + 1:
            self._compare()

    def end(self) -> None:
        self._carried.end()
        self.outside.end()
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        self._count(())
        self._seen, self._looked_at = [], []

    # -- steps ---------------------------------------------------------------------------------------------------

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        if self._ended_in >= 0 and id(optimizer) != self._last and self._ended_in == _backward():
            self._say_too_early(optimizer)
        if id(optimizer) in self._given or any(id(other) in self._given for other in running()):
            return  # an attached optimizer, or one inside it
        if id(optimizer) in self._ours:
            self._say_no_step(f"{type(optimizer).__name__} steps, and the optimizer around it does not")
            return
        self._foreign += 1
        if optimizer not in self._strangers:
            # Read ids now, because the id of a freed parameter may later belong to another one.
            known = self._trained | {id(p) for p in self._model.parameters()}
            self._strangers[optimizer] = any(id(p) in known for p in params_of(optimizer))
        name = type(optimizer).__name__
        if self._strangers[optimizer]:
            self._caveats.say(
                "other-optimizer",
                f"an optimizer {name} that was not passed to attach changes parameters of the model. Its state is not "
                "saved, and its steps do not end iterations. Close the session, and attach with every optimizer",
            )
        elif self._foreign >= 5 * SLACK and self._steps:
            self._caveats.say(
                "other-training",
                f"optimizers that attach was not given have taken {5 * SLACK} steps, and the attached ones none. "
                "If the model or its parameters were replaced, close the session and attach again",
                inexact=False,
            )

    def _say_too_early(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._given:
            self._caveats.say(
                "steps-in-backward",
                "optimizers step within the backward pass, and the last one given to attach is not the last to step. "
                "Iterations count as ended too early, so no step can be saved as a whole. Pass the optimizers to "
                "attach in the order in which they step, usually that of the parameters reversed, or "
                f"{_HINT}",
            )

    # -- backward passes -----------------------------------------------------------------------------------------

    def _hook(self, number: int) -> Any:
        def passed(_: torch.Tensor) -> None:
            self._backwards[number] += 1
            count = self._backwards[number]
            if count <= self._usual or count <= max(self._backwards[:number], default=0):
                return
            over = count - self._usual
            if over == 1 or over == SLACK // 2:
                self._seen = [p.detach().clone() for p in self._looked_at]
            elif over >= SLACK and over % SLACK == 0:
                self._compare()

        return uncompiled(passed)

    def _compare(self) -> None:
        for parameter, seen in zip(self._looked_at, self._seen, strict=False):
            now = parameter.detach()
            if now.shape != seen.shape or not torch.equal(now, seen.to(now.device)):
                return self._say_no_step("parameters change")
        return None

    def _say_no_step(self, what: str) -> None:
        self._caveats.say(
            "no-step",
            f"{what}, without a step of an optimizer that attach was given: none of it is saved. {_HINT[0].upper()}"
            f"{_HINT[1:]}",
        )
