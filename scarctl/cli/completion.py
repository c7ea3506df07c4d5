"""Complete the values of options in a shell: the folders that hold a store."""

from __future__ import annotations

import os
from collections.abc import Iterator

import click
from click.shell_completion import CompletionItem

_SETTINGS = "scarctl.json"
_DEPTH = 2
_MOST = 1000
"""Most folders that are searched: a completion has to be quick."""


def complete_store(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the folders below the typed one that hold a store; without any, have the shell complete folders."""
    if "://" in incomplete:
        return []
    above, _, start = incomplete.rpartition("/")
    root = f"{above}/" if "/" in incomplete else ""
    found = list(_stores(root, start, _DEPTH))
    return [CompletionItem(name) for name in found] or [CompletionItem(incomplete, type="dir")]


def _stores(root: str, start: str, depth: int) -> Iterator[str]:
    """Yield folders in `root` whose name begins with `start`, and folders in them, if they hold a store."""
    try:
        with os.scandir(os.path.expanduser(root) or ".") as entries:
            names = sorted(entry.name for entry in entries if entry.name.startswith(start) and entry.is_dir())
    except OSError:
        return  # an unreadable folder has no completions
    for name in names[:_MOST]:
        if name.startswith(".") and not start.startswith("."):
            continue
        path = root + name
        if os.path.exists(os.path.join(os.path.expanduser(path), _SETTINGS)):
            yield path
        elif depth > 1:
            yield from _stores(f"{path}/", "", depth - 1)
