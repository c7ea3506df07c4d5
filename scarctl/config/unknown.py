"""Name the option that was probably meant, when `scarctl.attach` or a class of options gets one that does not exist."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Any, ParamSpec, TypeVar

from scarctl.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")

GROUPS: dict[str, type[Any]] = {}
"""The groups of options that `attach` takes, by its argument: see `explained`."""
_OF_ATTACH = ("store", "fraction", "interval")
"""Options that `attach` takes itself; its groups have all others."""


def unknown_option(name: str, known: Collection[str], owner: str = "") -> UsageError:
    """Return the error for an option that is not among the `known` ones. It may be in a group, or misspelt.

    owner: the class that was given the option; "" for `attach`.
    """
    homes = {field.name: group for group, kind in GROUPS.items() for field in fields(kind)}
    others = [other for other in (*homes, *_OF_ATTACH) if other not in known]
    close = [name] if name in others else difflib.get_close_matches(name, [*known, *others], 1)
    if not close:
        hint = f"options: {', '.join(known)}"
    elif close[0] in known:
        hint = f"did you mean {close[0]}?"
    elif close[0] in homes:
        group = homes[close[0]]
        hint = f"did you mean {group}=scarctl.{GROUPS[group].__name__}({close[0]}=...)?"
    else:
        hint = f"did you mean scarctl.attach({close[0]}=...)?"
    return UsageError(f"{owner} has no option {name!r}" if owner else f"no option {name!r}", hint=hint)


def explains_options(function: Callable[P, T], owner: str = "") -> Callable[P, T]:
    """Have a function raise UsageError, with the option that was meant, for a keyword that it does not have."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> T:
        for name in options:
            if name not in known:
                raise unknown_option(name, known, owner)
        return function(*args, **options)

    return checked


def explained(argument: str = "") -> Callable[[type[T]], type[T]]:
    """Have the constructor of a class of options do so: see `explains_options`.

    argument: the argument of `attach` that takes a group of this class, if it is one.
    """

    def explain(kind: type[T]) -> type[T]:
        if argument:
            GROUPS[argument] = kind
        kind.__init__ = explains_options(kind.__init__, kind.__name__)  # type: ignore[method-assign]
        return kind

    return explain
