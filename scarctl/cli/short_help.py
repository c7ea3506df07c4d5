"""Shorten a help to one screen of 24 lines and 80 columns: `scarctl help COMMAND` shows all of it."""

from __future__ import annotations

import inspect
import re
import textwrap

import click

LINES, COLUMNS = 24, 80
COMMON = frozenset({"--json", "--debug", "--help", "--version", "--arena-dir"})
"""Options that most commands have. They are listed last, by name."""


def short_help(context: click.Context, commands: dict[str, str] | None = None) -> str:
    """Return the help of a command in at most 24 lines of 80 columns, if its examples leave room for that.

    commands: summaries of a group's commands, which are shown in place of options.
    To fit, it omits, in this order and only as far as necessary: later paragraphs, sentences about options, and the
    last options, which are then listed by name. Required options come first.
    """
    command = context.command
    about = inspect.cleandoc((command.help or "").partition("\f")[0]).split("\n\n")
    usage = " ".join(command.collect_usage_pieces(context))
    head = _wrap(f"Usage: {context.command_path} {usage}", "       ")
    options = _options(context) if commands is None else [*commands.items()]
    named = [name for param in command.get_params(context) for name in param.opts if name in COMMON]
    tail = _tail(context)

    def lines(paragraphs: int, details: list[str]) -> list[str]:
        dropped = [_long(name) for name, _ in options[len(details) :]]
        more = [*dropped, *named]
        return [
            *head,
            "",
            *(line for part in about[:paragraphs] for line in [*_wrap(part, "  ", "  "), ""]),
            *_table(options, details),
            *(_wrap(f"Also: {', '.join(more)}", "    ", "  ") if more else []),
            *tail,
        ]

    def fits(paragraphs: int, details: list[str]) -> bool:
        return len(lines(paragraphs, details)) <= LINES

    paragraphs, details = len(about), ["whole"] * len(options)
    while paragraphs > 1 and not fits(paragraphs, details):
        paragraphs -= 1
    if not fits(paragraphs, details):
        details = ["line"] * len(options)
    while details and not fits(paragraphs, details):
        details.pop()
    for k, detail in enumerate(details):
        for longer in ("whole", "sentence") if detail == "line" else ():
            if fits(paragraphs, [*details[:k], longer, *details[k + 1 :]]):
                details[k] = longer
                break
    return "\n".join(lines(paragraphs, details))


def _options(context: click.Context) -> list[tuple[str, str]]:
    """Return name and help of the options of this command alone, required ones first."""
    found = [
        (param, record)
        for param in context.command.get_params(context)
        if isinstance(param, click.Option)
        and COMMON.isdisjoint(param.opts)
        and (record := param.get_help_record(context)) is not None
    ]
    found.sort(key=lambda one: not one[0].required)
    return [record for _, record in found]


def _table(rows: list[tuple[str, str]], details: list[str]) -> list[str]:
    """Return the lines of names and helps. details: of each "whole", the first "sentence", or one "line"."""
    width = max((len(name) for name, _ in rows), default=0) + 4
    lines = []
    for (name, text), detail in zip(rows, details, strict=False):
        about = " ".join(text.split())
        if detail != "whole":
            about = _sentence(about, COLUMNS - width if detail == "line" else 1000)
        lines += _wrap(about, " " * width, f"  {name}".ljust(width)) or [f"  {name}"]
    return lines


def _sentence(text: str, room: int) -> str:
    """Return the first sentence without defaults, or as much of it as is in one piece and fits."""
    plain = re.sub(r"\s*\[[^\]]*(?:default|required|x>)[^\]]*\]", "", text)
    required = "  [required]" if "[required]" in text else ""
    for end in (r"(?<=\.)\s", r";\s", r",\s(?:or|and|instead|not|such)\b|\s\("):
        first = re.split(end, plain, maxsplit=1)[0]
        if len(first) + len(required) <= room:
            return first.rstrip(".") + required
    return textwrap.shorten(first, room - len(required), placeholder=" ...") + required


def _long(name: str) -> str:
    """Return the option's longest spelling, without its value: "-o, --output FILE" -> "--output"."""
    words = re.findall(r"--?[\w-]+", name)
    return max(words, key=len) if words else name


def _tail(context: click.Context) -> list[str]:
    """Return the examples, and the command for the full help."""
    words = context.command_path.partition(" ")[2]
    if context.parent is None:  # for scarctl itself: its settings and exit codes alone fill a screen
        return ["Full help, with settings and exit codes: scarctl help"]
    epilog = (context.command.epilog or "").replace("\b\n", "").rstrip().splitlines()
    return [*(["", *epilog] if epilog else []), f"Full help: scarctl help {words}"]


def _wrap(text: str, after: str, before: str = "") -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()),
        COLUMNS,
        initial_indent=before,
        subsequent_indent=after,
        break_on_hyphens=False,
    )
