"""Define `scarctl help` and `scarctl version`, for users who try a command before an option."""

from __future__ import annotations

import platform
import sys

import click

from scarctl import __version__
from scarctl.cli.groups import unknown
from scarctl.cli.output import EXIT_OK, emit, output_options


@click.command(
    "version",
    epilog="""\b
Examples:
  scarctl version
  scarctl version --json
""",
)
@output_options
def version() -> int:
    """Show the versions of scarctl and of the Python that runs it."""
    fields = {"version": __version__, "python": platform.python_version(), "executable": sys.executable}
    text = f"scarctl {__version__}, Python {platform.python_version()} ({sys.executable})"
    emit(fields, text=text)
    return EXIT_OK


@click.command(
    "help",
    epilog="""\b
Examples:
  scarctl help
  scarctl help verify
  scarctl help live recover
""",
)
@click.argument("words", metavar="[COMMAND]", nargs=-1)
@click.option("--man", "manual", is_flag=True, help="Print the manual page of all commands, for `man -l -`.")
@click.pass_context
def help_(context: click.Context, words: tuple[str, ...], manual: bool) -> int:
    """Show the help of scarctl or of a command, as --help does."""
    assert context.parent is not None, "this command belongs to scarctl's group"
    here = context.parent
    if manual:
        if words:
            raise click.UsageError("--man covers all commands: give it alone", context)
        click.echo(_manual(here), nl=False)
        return EXIT_OK
    for word in words:
        command = here.command
        if not isinstance(command, click.Group):
            raise click.UsageError(f"{here.command_path} has no commands of its own", here)
        found = command.get_command(here, word)
        if found is None:
            raise click.UsageError(unknown(word, command.list_commands(here)), here)
        here = click.Context(found, info_name=word, parent=here)
    click.echo(here.command.get_help(here))
    return EXIT_OK


def _manual(root: click.Context) -> str:
    from scarctl.cli import man

    return man.manual(root)
