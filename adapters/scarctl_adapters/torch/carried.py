"""Find loops whose steps use gradients of earlier iterations: gradients are not saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from scarctl.state.caveats import Caveats
from scarctl_adapters.torch.stepping import untraced

_STEPS = 4
"""Number of first steps before which gradients are checked."""
_PARAMETERS = 2
"""Number of parameters whose gradients are checked."""


class Carried:
    """Checks the gradients of a few parameters before backward passes add to them, in the first iterations."""

    def __init__(self, parameters: Sequence[torch.Tensor], caveats: Caveats) -> None:
        chosen = [p for p in (*parameters[:1], *parameters[-1:]) if p.requires_grad][:_PARAMETERS]
        self._parameters, self._caveats, self._steps = chosen, caveats, 0
        self._fresh = [False] * len(chosen)
        """Whether no backward pass has reached the parameter since the last step."""
        self._used = [False] * len(chosen)
        """Whether the parameter's gradient has a part from an earlier iteration."""
        self._handles: list[Any] = [p.register_hook(self._hook(n)) for n, p in enumerate(chosen)]  # type: ignore[no-untyped-call]

    def _hook(self, number: int) -> Callable[[torch.Tensor], None]:
        def arrives(_: torch.Tensor) -> None:
            before = self._parameters[number].grad
            if before is None:
                self._used[number] = False
            elif self._fresh[number] or self._used[number]:
                self._used[number] = before.layout == torch.strided and bool(before.any())
            self._fresh[number] = False

        return untraced(arrives)

    def stepped(self) -> None:
        """Note that an iteration has ended."""
        if not self._handles:
            return
        self._steps += 1
        carried = any(self._used)
        if carried:
            self._caveats.say(
                "gradients-carried",
                "steps use gradients that were left from the iteration before, and gradients are not saved. "
                "Call zero_grad() in every iteration",
            )
        self._fresh, self._used = [True] * len(self._fresh), [False] * len(self._used)
        if carried or self._steps == _STEPS:
            self.end()

    def end(self) -> None:
        """Remove the hooks."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
