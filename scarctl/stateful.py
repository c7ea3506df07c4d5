"""Objects with a state of their own that an exact resumption needs: generators, data positions, schedulers."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from scarctl.errors import UsageError


def check_stateful(name: str, item: Any) -> None:
    """Raise UsageError unless `item` is a dict, a numpy Generator, or has state_dict() and load_state_dict()."""
    if isinstance(item, dict | np.random.Generator):
        return
    if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
        raise UsageError(
            f"{name} is a {type(item).__name__}, which has no state_dict() and load_state_dict()",
            hint="pass an object that has them, a dict, or a numpy Generator",
        )


def check_names(what: str, saved: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise UsageError when a run is resumed with other objects than it was started with."""
    if saved.keys() != given.keys():
        raise UsageError(
            f"the store has the {what} {sorted(saved)}, attach was given {sorted(given)}",
            hint="give the same ones as in the run that is resumed",
        )


def state_of(item: Any) -> Any:
    """State of an object: its state_dict(), a dict's items, or a numpy Generator's bit generator state."""
    if isinstance(item, dict):
        return dict(item)
    if isinstance(item, np.random.Generator):
        return item.bit_generator.state
    return item.state_dict()


def restore_state(item: Any, state: Any) -> None:
    """Put `state_of` back into an object, in place."""
    if isinstance(item, dict):
        item.clear()
        item.update(state)
    elif isinstance(item, np.random.Generator):
        item.bit_generator.state = state
    else:
        item.load_state_dict(state)


def capture_host_rng() -> dict[str, Any]:
    """Global random number generators of Python and numpy."""
    version, internal, gauss = random.getstate()
    # As an array: 625 integers would be most of the extras' text.
    return {"python": (version, np.array(internal, dtype=np.int64), gauss), "numpy": np.random.get_state()}


def restore_host_rng(state: Mapping[str, Any]) -> None:
    """Put `capture_host_rng` back."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal.tolist()), gauss))
    np.random.set_state(state["numpy"])
