"""Optimizers' steps as torch's hooks see them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch.optim import Optimizer

_WRAPPER = Optimizer.profile_hook_step(lambda *_: None).__code__
"""Of what torch puts around every optimizer's step."""


def running() -> Iterator[Optimizer]:
    """Optimizers whose step is running in this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _WRAPPER:
            optimizer = frame.f_locals.get("self")
            if isinstance(optimizer, Optimizer):
                yield optimizer
        frame = frame.f_back


def is_nested(optimizer: Optimizer) -> bool:
    """Whether the step that runs is within another one of the same optimizer: one that calls its parent class's."""
    return sum(other is optimizer for other in running()) > 1


def beginning(before: Callable[[], None]) -> Callable[..., Any]:
    """A pre hook that calls `before` at the last moment at which no parameter has changed."""

    def hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None or not type(optimizer).__module__.startswith("torch.optim."):
            before()
            return None

        def computed(*given: Any, **named: Any) -> Any:
            result = closure(*given, **named)
            before()
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": computed}
        return (args[0], computed, *args[2:]), kwargs

    return hook
