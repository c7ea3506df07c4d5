"""Capture and restore objects with a state that a resume needs: generators, data positions, schedulers."""

from __future__ import annotations

import functools
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scarctl.errors import UsageError
from scarctl.util.generators import HostStates, keep_host


def check_stateful(name: str, item: Any) -> None:
    """Raise UsageError unless `item` is a dict, a random generator, or has state_dict() and load_state_dict()."""
    if isinstance(item, dict | np.random.Generator | random.Random) or _is_generator(item):
        return
    methods = (getattr(item, method, None) for method in ("state_dict", "load_state_dict"))
    if isinstance(item, type) or not all(map(callable, methods)):
        what = f"the class {item.__name__}" if isinstance(item, type) else f"a {type(item).__name__}"
        raise UsageError(
            f"{name} is {what}, which has no state_dict() and load_state_dict()",
            hint="pass an object with both methods, a dict, or a random number generator",
        )


def check_names(what: str, saved: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise UsageError if the names of the given objects differ from those in the store."""
    if saved.keys() != given.keys():
        raise UsageError(
            f"the store has the {what} {sorted(saved)}, but attach was given {sorted(given)}",
            hint=f"give attach the same {what} as in the run to resume",
        )


def _is_generator(item: Any) -> bool:
    """Return whether `item` is a torch generator or a numpy `RandomState`, without importing torch."""
    return hasattr(item, "get_state") and hasattr(item, "set_state") and not hasattr(item, "state_dict")


def state_of(item: Any) -> Any:
    """Return the state of an object: its state_dict(), a copy of a dict, or the state of a random number generator."""
    if isinstance(item, dict):
        return dict(item)
    if isinstance(item, np.random.Generator):
        return item.bit_generator.state
    if isinstance(item, random.Random):
        return _state_of_python(item.getstate())
    return item.get_state() if _is_generator(item) else item.state_dict()


def restore_state(item: Any, state: Any) -> None:
    """Restore the result of `state_of` into an object, in place.

    Subclasses of tuple are saved as plain tuples. They regain the class of the live value in their place.
    """
    if isinstance(item, dict):
        state = _like(state, item)
        item.clear()
        item.update(state)
    elif isinstance(item, np.random.Generator):
        item.bit_generator.state = state
    elif isinstance(item, random.Random):
        item.setstate(_python_state(state))
    elif _is_generator(item):
        item.set_state(state)
    else:
        item.load_state_dict(_like(state, item.state_dict()) if _has_tuple(state) else state)


def _has_tuple(state: Any) -> bool:
    if isinstance(state, Mapping):
        return any(map(_has_tuple, state.values()))
    return type(state) is tuple or (isinstance(state, list) and any(map(_has_tuple, state)))


def _like(state: Any, live: Any) -> Any:
    if type(state) is tuple:
        if not _same_size(state, live):
            numbers = isinstance(live, tuple) and type(live) is not tuple and not hasattr(live, "_fields")
            return type(live)(state) if numbers else state
        items = tuple(_like(item, there) for item, there in zip(state, live, strict=True))
        if type(live) is tuple or not isinstance(live, tuple):
            return items
        return type(live)(*items) if hasattr(live, "_fields") else type(live)(items)
    if type(state) is list and _same_size(state, live):
        return [_like(item, there) for item, there in zip(state, live, strict=True)]
    if type(state) in (dict, OrderedDict) and isinstance(live, Mapping):
        return type(state)((key, _like(item, live.get(key))) for key, item in state.items())
    return state


def _same_size(state: Sequence[Any], live: Any) -> bool:
    return isinstance(live, list | tuple) and len(live) == len(state)


def capture_host_rng() -> dict[str, Any]:
    """Return the states of the global random number generators of Python and numpy."""
    return host_rng_of(keep_host())


def host_rng_of(states: HostStates) -> dict[str, Any]:
    """Return what `capture_host_rng` would have returned when these states were read."""
    return {"python": _python_of(states), "numpy": states.numpy()}


@functools.lru_cache(1)
def _python_of(states: HostStates) -> tuple[Any, ...]:
    """Return Python's state as it is saved. Most loops do not draw from it, and keep the same states for long."""
    found = _state_of_python(states.python())
    found[1].setflags(write=False)
    return found


def restore_host_rng(state: Mapping[str, Any]) -> None:
    """Restore the result of `capture_host_rng`."""
    random.setstate(_python_state(state["python"]))
    np.random.set_state(state["numpy"])


def _state_of_python(state: tuple[Any, ...]) -> tuple[Any, ...]:
    version, internal, gauss = state
    # An array, because 625 integers would dominate the extras' text.
    return version, np.array(internal, dtype=np.int64), gauss


def _python_state(saved: Any) -> tuple[Any, ...]:
    version, internal, gauss = saved
    return version, tuple(internal.tolist()), gauss
