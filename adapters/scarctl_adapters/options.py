"""Check the options of a framework's adapter: options of `scarctl.attach` that the adapter does not set."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import scarctl
from scarctl.config.unknown import unknown_option
from scarctl.errors import UsageError


def check_options(
    options: Mapping[str, Any], *, given: Collection[str], owner: str, names: Collection[str]
) -> None:
    """Raise UsageError for options that a user of an adapter may not give.

    given: arguments of `scarctl.attach` that the adapter takes from `owner`, a name for messages.
    names: names of the adapter's own extras.
    """
    known = sorted(set(inspect.signature(scarctl.attach).parameters) - set(given))
    for name in options:
        if name in given:
            raise UsageError(f"{name} comes from {owner}", hint=f"omit {name}")
        if name not in known:
            raise unknown_option(name, known)
    for name in sorted(set(names) & set(options.get("extras") or {})):
        raise UsageError(f"the extra {name!r} is scarctl's own", hint="give yours another name")


def with_extras(options: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` with the adapter's own extras added: objects by name, or `scarctl.Extra`."""
    return {**options, "extras": {**(options.get("extras") or {}), **own}}
