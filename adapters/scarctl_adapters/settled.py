"""Keep the values of the moment at which a framework's loop was done with a step.

A framework changes schedules, counters and callbacks after the optimizer's step, and again in a validation or at an
epoch's end. A resumed run repeats the latter, so a checkpoint needs the values from before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Settled(Generic[T]):
    """The values of one step. `value` is None until the loop is done with the step."""

    def __init__(self, capture: Callable[[], T]) -> None:
        """capture: returns the current values."""
        self._capture = capture
        self.value: T | None = None

    def settle(self) -> None:
        """Keep the current values, unless values of this step are already kept."""
        if self.value is None:
            self.value = self._capture()

    def drop(self) -> None:
        """Drop the values: a step or a recovery has changed them."""
        self.value = None
