"""Share what adapters of loops over arrays have in common: the iteration ends when the loop says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from scarctl.state.layout import Layout
from scarctl.state.torch_dtypes import private
from scarctl.stateful import (
    capture_host_rng,
    check_names,
    check_stateful,
    restore_host_rng,
    restore_state,
    state_of,
)


class LoopAdapter:
    """The part of an `Adapter` that saves the user's extras, and the random generators of Python and numpy.

    Arrays have no slots and no buffers, and nothing of an iteration changes after its end.
    """

    extras_per_rank: ClassVar[bool] = False

    def __init__(self, extras: Mapping[str, Any] | None) -> None:
        """Take the user's extras. Raises UsageError for one without a state that can be saved."""
        self._extras = dict(extras or {})
        for name, item in self._extras.items():
            check_stateful(name, item)

    def buffers(self) -> dict[str, torch.Tensor]:
        return {}

    def create_slots(self, layout: Layout) -> Callable[[], None]:
        return lambda: None

    def capture(self) -> dict[str, Any]:
        return {
            "rng": capture_host_rng(),
            "extras": {name: private(state_of(item)) for name, item in self._extras.items()},
        }

    def mix(self, theirs: Any, own: Any) -> Any:
        return theirs

    def restore(self, state: Any) -> None:
        check_names("extras", state["extras"], self._extras)
        for name, item in self._extras.items():
            restore_state(item, state["extras"][name])
        restore_host_rng(state["rng"])
