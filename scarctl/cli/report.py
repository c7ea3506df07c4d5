"""Define `scarctl report`: write the known facts about a store as one HTML file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import click

from scarctl.cli.given import required_store
from scarctl.cli.output import (
    EXIT_OK,
    EXIT_PARTLY,
    arena_option,
    emit,
    open_store,
    output_options,
    store_argument,
    warn,
)
from scarctl.errors import UsageError

EXAMPLES = """\b
Examples:
  scarctl report ckpt
  scarctl report s3://bucket/run --output report.html --json
"""


@click.command(epilog=EXAMPLES)
@store_argument
@click.option(
    "--output",
    "-o",
    default="scarctl-report.html",
    show_default=True,
    metavar="FILE",
    help="HTML file to write; an existing one is replaced.",
)
@arena_option
@output_options
def command(place: str | None, store: str | None, output: str, arena_dir: str | None) -> int:
    """Write a page on a store: whether it is safe now, ages over time, failures, what changes, what was restored.

    It is one file for any browser, on screen or paper, and loads nothing. Its data are embedded as JSON. With --json
    the command also prints them.
    """
    from scarctl.cli.report_page import page
    from scarctl.ops.report import gather

    wanted = required_store(place, store)
    target = Path(output)
    if target.is_dir() or not target.parent.is_dir():
        raise UsageError(
            f"{target} cannot be written as a file", hint="give a file in an existing folder: report.html"
        )
    found = gather(open_store(wanted), arena_dir)
    document = found.to_json()
    _write(target, page(found, document))
    emit({**document, "output": str(target)}, text=f"wrote {target}")
    if found.history.damage is None:
        return EXIT_OK
    warn(f"the history cannot be shown: {found.history.damage}; `scarctl verify` lists all damage")
    return EXIT_PARTLY


def _write(target: Path, content: str) -> None:
    """Replace the file in one step; an earlier page stays after an error.

    Raises UsageError, AccessDenied, Unavailable.
    """
    from scarctl.formats.state_file import os_errors

    with os_errors(target):
        number, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with open(number, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(content)
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(name, 0o666 & ~umask)
            os.replace(name, target)
        except OSError as error:
            os.unlink(name)
            error.filename = str(target)
            raise
        except BaseException:
            os.unlink(name)
            raise
