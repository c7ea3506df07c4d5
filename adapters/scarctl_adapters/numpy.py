"""Adapt a training without torch: a dict of numpy arrays that the loop changes or replaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from scarctl.adapter import StateGroup
from scarctl.errors import UsageError
from scarctl.state.layout import Layout
from scarctl.stateful import (
    capture_host_rng,
    check_names,
    check_stateful,
    restore_host_rng,
    restore_state,
    state_of,
)


class NumpyAdapter:
    """An `Adapter` of a dict of arrays: every array is a group without slots.

    There are no hooks: the loop calls `session.step()` at the end of every iteration.
    """

    automatic: ClassVar[bool] = False
    late_per_rank: ClassVar[bool] = False

    def __init__(self, state: Mapping[str, Any], extras: Mapping[str, Any]) -> None:
        self._state = state
        self._extras = dict(extras)

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
        for name, item in (extras or {}).items():
            check_stateful(name, item)
        adapter = cls(model, extras or {})
        adapter.groups()
        return adapter

    def mix_late(self, theirs: Any, own: Any) -> Any:
        return theirs

    @property
    def optimizer(self) -> str:
        """Always "", because the arrays of an optimizer are ordinary groups."""
        return ""

    def groups(self) -> list[StateGroup]:
        """Return the arrays that the dict now holds: a loop may replace them."""
        groups = []
        for name, array in self._state.items():
            if not isinstance(array, np.ndarray):
                raise UsageError(
                    f"state[{name!r}] is a {type(array).__name__}, not a numpy array",
                    hint="make it an array, or pass it in extras",
                )
            if not array.flags.writeable:
                raise UsageError(
                    f"state[{name!r}] is read-only, so it could not be restored", hint="pass a copy"
                )
            try:
                groups.append(StateGroup(name, "parameter", {"": torch.from_numpy(array)}))
            except (TypeError, ValueError) as error:
                raise UsageError(f"state[{name!r}] has dtype {array.dtype}: {error}") from error
        return groups

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return {}: every array is a parameter."""
        return {}

    def capture_early(self) -> dict[str, Any]:
        """Return the states of Python's and numpy's random number generators and the user's extras."""
        return {
            "rng": capture_host_rng(),
            "extras": {name: state_of(item) for name, item in self._extras.items()},
        }

    def capture_late(self) -> None:
        """Return None: `session.step()` is called at the end of the iteration."""
        return

    def restore(self, early: Any, late: Any) -> None:
        """Restore `capture_early`."""
        check_names("extras", early["extras"], self._extras)
        for name, item in self._extras.items():
            restore_state(item, early["extras"][name])
        restore_host_rng(early["rng"])

    def create_slots(self, layout: Layout) -> Callable[[], None]:
        """Do nothing, because groups have no slots."""
        return lambda: None

    def install(self, before: Callable[[], None], after: Callable[[], None] | None) -> Callable[[], None]:
        """Raise UsageError, because a loop over arrays has no hooks."""
        raise UsageError(
            "a loop over numpy arrays has no hooks", hint="call session.step() after every iteration"
        )
