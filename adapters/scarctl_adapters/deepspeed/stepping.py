"""Call functions before ZeRO changes master weights, and after the engine's step has ended.

ZeRO steps its inner optimizer once for each flat tensor, and hides the other tensors meanwhile. So that optimizer's
hooks would see parts of a step. Methods of the engine and of ZeRO are replaced on these two objects, until the last
removal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Pair = tuple[Callable[[], None], Callable[[], None] | None]


class Stepping:
    """The replaced methods of one engine, shared by all that have been installed."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._zero = engine, engine.optimizer
        self._step, self._inner = engine.step, self._zero._optimizer_step
        self._pairs: list[Pair] = []
        self._changed = False
        """Whether the present step has begun to change master weights."""
        engine.step, self._zero._optimizer_step = self.step, self.optimizer_step

    @classmethod
    def install(
        cls, engine: Any, before: Callable[[], None], after: Callable[[], None] | None
    ) -> Callable[[], None]:
        """Call `before` and `after` around every step that changes master weights. Return the removal."""
        there = getattr(vars(engine).get("step"), "__self__", None)
        stepping = there if isinstance(there, cls) else cls(engine)
        pair = before, after
        stepping._pairs.append(pair)

        def remove() -> None:
            if pair in stepping._pairs:
                stepping._pairs.remove(pair)
                if not stepping._pairs:
                    stepping._end()

        return remove

    def _end(self) -> None:
        for owner, name in ((self._engine, "step"), (self._zero, "_optimizer_step")):
            if getattr(vars(owner).get(name), "__self__", None) is self:
                delattr(owner, name)

    def step(self, *given: Any, **named: Any) -> Any:
        """Step the engine. A micro-batch that is only accumulated, and a skipped step, change no master weights."""
        self._changed = False
        result = self._step(*given, **named)
        if self._changed:
            for _, after in list(self._pairs):
                if after is not None:
                    after()
        return result

    def optimizer_step(self, *given: Any, **named: Any) -> Any:
        """Step the inner optimizer for one flat tensor."""
        if not self._changed:
            for before, _ in list(self._pairs):
                before()
            self._changed = True
        return self._inner(*given, **named)
