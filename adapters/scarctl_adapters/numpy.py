"""Adapt a training without torch: a dict of numpy arrays that the loop changes or replaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from scarctl.adapter import StateGroup
from scarctl.errors import UsageError
from scarctl_adapters.loop import LoopAdapter


class NumpyAdapter(LoopAdapter):
    """An `Adapter` of a dict of arrays: every array is a group without slots.

    There are no hooks: the loop calls `session.step()` at the end of every iteration.
    """

    automatic: ClassVar[bool] = False

    def __init__(self, state: Mapping[str, Any], extras: Mapping[str, Any] | None) -> None:
        super().__init__(extras)
        self._state = state
        self._known: dict[str, tuple[Any, object, StateGroup]] = {}
        """The arrays and their groups at the newest look, with the forms that an array can change."""

    @classmethod
    def build(
        cls,
        model: Any,
        optimizers: Sequence[Any],
        *,
        schedulers: Sequence[Any] = (),
        scaler: Any = None,
        extras: Mapping[str, Any] | None = None,
        replicated: Sequence[str] = (),
    ) -> NumpyAdapter:
        """Make an adapter. Raises UsageError for a model without writable arrays, and for optimizers.

        model: maps names to arrays. replicated: patterns of names whose arrays all ranks keep equal.
        """
        if optimizers or schedulers or scaler is not None:
            raise UsageError(
                "a dict of arrays takes no optimizer, scheduler or scaler", hint="pass their arrays too"
            )
        adapter = cls(model, extras)
        adapter.groups()
        return adapter

    @property
    def optimizer(self) -> str:
        """Always "", because the arrays of an optimizer are ordinary groups."""
        return ""

    def groups(self) -> list[StateGroup]:
        """Return the arrays that the dict now holds: a loop may replace them. A group stays while its array does."""
        known, found = self._known, dict[str, tuple[Any, object, StateGroup]]()
        for name, array in self._state.items():
            before = known.get(name)
            if before is None or before[0] is not array or before[1] != _form(array):
                found[name] = array, _form(array), _group(name, array)
            else:
                found[name] = before
        self._known = found
        return [group for _, _, group in found.values()]

    def install(self, before: Callable[[], None], after: Callable[[], None] | None) -> Callable[[], None]:
        """Raise UsageError, because a loop over arrays has no hooks."""
        raise UsageError(
            "a loop over numpy arrays has no hooks", hint="call session.step() after every iteration"
        )


def _form(array: Any) -> object:
    return isinstance(array, np.ndarray) and (array.shape, array.strides, array.dtype, array.flags.writeable)


def _group(name: str, array: Any) -> StateGroup:
    if not isinstance(array, np.ndarray):
        raise UsageError(
            f"state[{name!r}] is a {type(array).__name__}, not a numpy array",
            hint="make it an array, or pass it in extras",
        )
    if not array.flags.writeable:
        raise UsageError(f"state[{name!r}] is read-only, so it could not be restored", hint="pass a copy")
    try:
        return StateGroup(name, "parameter", {"": torch.from_numpy(array)})
    except (TypeError, ValueError) as error:
        raise UsageError(f"state[{name!r}] has dtype {array.dtype}: {error}") from error
