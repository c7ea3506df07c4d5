"""Hook into Lightning's loops where they make iterators and begin epochs, and continue a resumed fit there."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

from scarctl.checkpoint.randomness import capture_rng, restore_rng
from scarctl_adapters.lightning.data_order import DataOrder
from scarctl_adapters.lightning.position import FitPosition


class LoopHooks:
    """Replace two methods of a trainer's loops from the start of a fit to `close`."""

    def __init__(self, trainer: Any, position: FitPosition, order: DataOrder) -> None:
        self._trainer = trainer
        self._position = position
        self._order = order
        self._random: Any = None
        self._inside = False
        self._validates = False
        self._max_steps: int | None = None
        self._quiet = contextlib.ExitStack()
        loop = trainer.fit_loop
        self._undo = [
            _wrap(loop, "_load_combined_loader_states", self._before_iterator),
            _wrap(loop.epoch_loop, "on_run_start", self._epoch_starts),
        ]

    def resume(self) -> None:
        """Continue at the restored position in the next epoch. The current random numbers are those of the position."""
        self._random = capture_rng()
        self._inside = self._position.restore_counters()
        epoch_loop = self._trainer.fit_loop.epoch_loop
        if self._inside and 0 <= epoch_loop.max_steps <= epoch_loop.global_step:
            # The validation and the epoch's end after the last step may still be missing.
            self._max_steps, epoch_loop.max_steps = epoch_loop.max_steps, epoch_loop.global_step + 1

    def train_starts(self) -> None:
        """Prepare for the first epoch."""
        self._position.running = True
        if self._random is None:
            return
        if self._inside:
            # Lightning warns that the data cannot be resumed, but here they are.
            self._quiet.enter_context(warnings.catch_warnings())
            warnings.filterwarnings(
                "ignore", message=".*resuming from a checkpoint that ended before the epoch"
            )
        else:
            restore_rng(self._random)
            self._random = None

    def validation_starts(self) -> None:
        """Correct the counters before a validation's first batch."""
        if self._validates:
            self._validates = False
            self._position.correct_validation()

    def close(self) -> None:
        """Restore Lightning's methods and settings."""
        self._quiet.close()
        if self._max_steps is not None:
            self._trainer.fit_loop.epoch_loop.max_steps = self._max_steps
        while self._undo:
            self._undo.pop()()

    def _before_iterator(self, original: Callable[..., Any]) -> Any:
        result = original()
        self._order.iterator_made()
        return result

    def _epoch_starts(self, original: Callable[..., Any], fetcher: Any) -> None:
        self._quiet.close()
        fit_loop = self._trainer.fit_loop
        if self._random is not None and self._inside:
            original(fetcher)
            self._continue_inside(fetcher)
            return
        before, made = _iterator(fit_loop), self._order.random_now()
        original(fetcher)
        if _iterator(fit_loop) is not before:
            self._order.iterator_made(made)
        self._order.epoch_begun()

    def _continue_inside(self, fetcher: Any) -> None:
        """Continue within an epoch, at the batch after the restored position."""
        fit_loop = self._trainer.fit_loop
        epoch_loop = fit_loop.epoch_loop
        self._order.advance(fetcher)
        epoch_loop.batch_progress.is_last_batch = fetcher.done
        self._validates = epoch_loop._should_check_val_fx(fetcher)
        self._position.correct_counters(validation_due=self._validates)
        # At the epoch's end Lightning must not act as after a restart: schedulers that wait for it step there.
        fit_loop._restarting = False
        if self._max_steps is not None:
            epoch_loop.max_steps, self._max_steps = self._max_steps, None
            if not self._validates:
                # Lightning would train one more batch before it checks max_steps.
                fetcher.batches.clear()
                fetcher.done = True
        restore_rng(self._random)
        self._random = None


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Call `around(original, ...)` in place of a method of this one object. Return the function that undoes it."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args: around(original, *args))
    return lambda: delattr(owner, name)


def _iterator(fit_loop: Any) -> Any:
    return getattr(fit_loop._combined_loader, "_iterator", None)
