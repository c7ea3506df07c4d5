"""Detect running and nested optimizer steps, and the moment before a parameter changes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from scarctl.checkpoint.streams import is_capturing

_WRAPPER = Optimizer.profile_hook_step(lambda *_: None).__code__
"""Code of torch's wrapper around every optimizer's step."""
Hook = TypeVar("Hook", bound=Callable[..., Any])


def untraced(hook: Hook) -> Hook:
    """Return a hook that `torch.compile` runs unchanged when it compiles the step with the hook.

    torch's own wrapper takes seven calls for that. They are left out where nothing is compiled.
    """
    kept: Hook = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    try:
        from torch._C._dynamo.eval_frame import get_eval_frame_callback
    except ImportError:
        return kept

    def quick(*args: Any) -> Any:
        # The first condition holds while this is traced, the second one while a compiled function runs.
        if torch.compiler.is_compiling() or get_eval_frame_callback() is not None:
            return kept(*args)
        return hook(*args)

    return uncompiled(quick)  # type: ignore[return-value]


def uncompiled(hook: Hook) -> Hook:
    """Return the hook, excluded from compilation where a backward pass calls it while a compiled step runs."""
    try:
        from torch._dynamo.eval_frame import skip_code
    except ImportError:
        return hook
    skip_code(hook.__code__)
    return hook


def running() -> Iterator[Optimizer]:
    """Yield the optimizers whose step is running in this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _WRAPPER:
            optimizer = frame.f_locals.get("self")
            if isinstance(optimizer, Optimizer):
                yield optimizer
        frame = frame.f_back


def is_nested(optimizer: Optimizer) -> bool:
    """Return whether the running step is inside another step of the same optimizer, such as its parent class's."""
    frame, found = sys._getframe(1), 0
    while frame is not None:  # as in `running`; called twice per step, below all of the program's frames
        if frame.f_code is _WRAPPER and frame.f_locals.get("self") is optimizer:
            found += 1
        frame = frame.f_back  # type: ignore[assignment]
    return found > 1


class _Nesting:
    """Counts one optimizer's running steps, from its pre and post hooks: quicker than inspecting frames.

    A step that raises never calls its post hook. So frames decide whenever the count indicates a nested step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._depth = 0
        self.on_gpu: bool | None = None
        """Whether the optimizer has a parameter on a GPU; None before its first step."""

    def captured(self) -> bool:
        """Return whether the running step is only recorded, in a CUDA graph."""
        if self.on_gpu is None:
            self.on_gpu = any(p.is_cuda for group in self._optimizer.param_groups for p in group["params"])
        return self.on_gpu and is_capturing()

    def enters(self) -> bool:
        """Count a step that begins. Return whether it is nested."""
        self._depth += 1
        if self._depth == 1:
            return False
        nested = is_nested(self._optimizer)
        if not nested:
            self._depth = 1
        return nested

    def leaves(self) -> bool:
        """Count a step that ends. Return whether it was nested."""
        nested = self._depth > 1 and is_nested(self._optimizer)
        self._depth = self._depth - 1 if nested else 0
        return nested


def around(
    optimizer: Optimizer,
    before: Callable[[], None],
    after: Callable[[], None] | None,
    captured: Callable[[], None],
) -> list[Any]:
    """Call `before` and `after` around every step of `optimizer` that is not nested. Return the hooks' handles.

    captured: called instead of both for a step that a CUDA graph records: it changes nothing now, and replays of the
    graph call no hook.
    """
    nesting = _Nesting(optimizer)

    @untraced
    def begins(*_: object) -> None:
        if nesting.on_gpu is not False and nesting.captured():
            captured()
        elif not nesting.enters():
            before()

    @untraced
    def ends(*_: object) -> None:
        if nesting.on_gpu and nesting.captured():
            return
        if not nesting.leaves() and after is not None:
            after()

    return [optimizer.register_step_pre_hook(begins), optimizer.register_step_post_hook(ends)]


def at_the_change(optimizer: Optimizer, before: Callable[[], None], captured: Callable[[], None]) -> Any:
    """Call `before` at the last moment before a step of `optimizer` changes a parameter. Return the hook's handle.

    captured: see `around`.
    """

    nesting = _Nesting(optimizer)

    def begins() -> None:
        if nesting.on_gpu is not False and nesting.captured():
            captured()
        elif not is_nested(optimizer):
            before()

    return optimizer.register_step_pre_hook(untraced(_beginning(begins)))


def _beginning(before: Callable[[], None]) -> Callable[..., Any]:
    """Return a pre hook that calls `before` at the last moment before a parameter changes."""

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
