"""Write the manual page from the help of the commands and their options: `scarctl help --man`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from scarctl import __version__


def manual(root: click.Context) -> str:
    """Return the page in roff. The root's epilog has examples, settings and exit codes, in lines that are kept."""
    lines = [
        f'.TH SCARCTL 1 "" "scarctl {__version__}" "User Commands"',
        ".SH NAME",
        f"scarctl \\- {_escaped(_text(root.command)[0].rstrip('.').lower())}",
        ".SH SYNOPSIS",
        ".B scarctl",
        "COMMAND [OPTIONS] [ARGS]",
        ".SH COMMANDS",
    ]
    for context in _leaves(root):
        lines += _command(context, root)
    lines += [".SH EXAMPLES, SETTINGS AND EXIT CODES", ".nf"]
    epilog = (root.command.epilog or "").replace("\b\n", "")
    lines += [_escaped(line) for line in epilog.strip().splitlines()]
    return "\n".join([*lines, ".fi", ""])


def _leaves(context: click.Context) -> Iterator[click.Context]:
    """Yield the context of every command that does something, in order."""
    if not isinstance(context.command, click.Group):
        yield context
        return
    for name in context.command.list_commands(context):
        command = context.command.get_command(context, name)
        assert command is not None
        yield from _leaves(click.Context(command, info_name=name, parent=context))


def _command(context: click.Context, root: click.Context) -> Iterator[str]:
    words = context.command_path.removeprefix(root.command_path).strip()
    usage = " ".join(part for part in context.command.collect_usage_pieces(context) if part != "[OPTIONS]")
    yield f".SS scarctl {_escaped(f'{words} {usage}'.strip())}"
    for k, paragraph in enumerate(_text(context.command)):
        yield from ([".PP"] if k else [])
        yield _escaped(paragraph)
    for parameter in context.command.get_params(context):
        record = parameter.get_help_record(context)
        if isinstance(parameter, click.Option) and record is not None and "--help" not in parameter.opts:
            yield from (".TP", f".B {_escaped(record[0])}", _escaped(" ".join(record[1].split())))


def _text(command: click.Command) -> list[str]:
    """Return the paragraphs of a command's description."""
    return [" ".join(part.split()) for part in inspect.cleandoc(command.help or "").split("\n\n")]


def _escaped(line: str) -> str:
    text = line.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text
