"""Name the option of `scarctl.attach` that was probably meant, when a call has one that does not exist."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import fields
from typing import ParamSpec, TypeVar

from scarctl.config.options import Partitioning, Selection, Settings
from scarctl.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")

_GROUPS = {"partitioning": Partitioning, "selection": Selection, "settings": Settings}
_GROUPED = {field.name: name for name, group in _GROUPS.items() for field in fields(group)}


def unknown_option(name: str, known: Collection[str]) -> UsageError:
    """Return the error for an option that is not among the `known` ones. It may be in a group, or misspelt."""
    close = [name] if name in _GROUPED else difflib.get_close_matches(name, [*known, *_GROUPED], 1)
    if not close:
        hint = f"options: {', '.join(known)}"
    elif close[0] in known:
        hint = f"did you mean {close[0]}?"
    else:
        group = _GROUPED[close[0]]
        hint = f"did you mean {group}=scarctl.{_GROUPS[group].__name__}({close[0]}=...)?"
    return UsageError(f"no option {name!r}", hint=hint)


def explains_options(function: Callable[P, T]) -> Callable[P, T]:
    """Have a function raise UsageError, with the option that was meant, for a keyword that it does not have."""
    known = inspect.signature(function).parameters.keys()

    @functools.wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> T:
        for name in options:
            if name not in known:
                raise unknown_option(name, known)
        return function(*args, **options)

    return checked
