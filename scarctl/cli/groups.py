"""Group commands, and answer an unknown command with the similar ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import click

_MEANT = {
    "check": "verify",
    "fsck": "verify",
    "gc": "prune",
    "info": "inspect",
    "ls": "inspect",
    "restore": "recover",
    "rm": "delete",
    "save": "checkpoint",
    "show": "inspect",
}
"""Words of other tools for commands of this one."""


class Group(click.Group):
    """A group that suggests a command for an unknown one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return name, command and remaining arguments. Raises click.UsageError for an unknown command."""
        name, known = args[0], self.list_commands(ctx)
        if not name.startswith("-") and name not in known:
            raise click.UsageError(unknown(name, known), ctx)
        return super().resolve_command(ctx, args)


def unknown(name: str, commands: Iterable[str]) -> str:
    """Return the message for an unknown command, with the commands that may have been meant."""
    known = list(commands)
    word = name.lower()
    near = [_MEANT[word]] if _MEANT.get(word) in known else difflib.get_close_matches(word, known, 2)
    return f"there is no command {name!r}" + (f"; did you mean {' or '.join(near)}?" if near else "")
