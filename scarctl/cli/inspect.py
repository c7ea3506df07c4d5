"""`scarctl inspect`: show a store's copies, their ages, and the effect of losing a shard."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from scarctl.cli.given import refuse
from scarctl.cli.output import EXIT_OK, Seconds, arena_option, common_options, emit, open_store

EXAMPLES = """\b
Examples:
  scarctl inspect --store ckpt
  scarctl inspect --store ckpt --json --limit all
  scarctl inspect --store ckpt --watch --every 10
"""


class _Limit(click.ParamType[Any]):
    name = "N|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value is None or str(value).lower() == "all":
            return None
        try:
            number = int(value)
        except ValueError:
            number = -1
        if number < 0:
            self.fail(f"{value!r} is neither a number, 0 or more, nor 'all'", param, ctx)
        return number


@click.command(epilog=EXAMPLES)
@click.option(
    "--limit",
    type=_Limit(),
    default="1000",
    show_default=True,
    metavar="N|all",
    help="Partitions that --json lists.",
)
@arena_option
@click.option("--watch", "follow", is_flag=True, help="Repeat until the run on this host ends.")
@click.option(
    "--every",
    type=Seconds(at_least=0.1),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two looks with --watch.",
)
@common_options
def command(
    store: str,
    limit: int | None,
    arena_dir: str | None,
    follow: bool,
    every: float,
    as_json: bool,
    debug: bool,
) -> int:
    """Show a store's copies, their ages and sizes, and the predicted effect of losing each shard.

    Distances and the newest step of a run are known as long as its arena is on this host. With --watch, --json prints
    one document per line; it lists no partitions unless --limit asks for them.
    """
    from scarctl.ops.survey import survey

    if not follow:
        refuse("every", why="goes with --watch")
    if not as_json:
        refuse("limit", why="goes with --json: tables show the partitions at most risk")
    opened = open_store(store)
    on_screen = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    if follow:
        from scarctl.cli.watch import watch

        if click.get_current_context().get_parameter_source("limit") is click.core.ParameterSource.DEFAULT:
            limit = 0
        watch(lambda: survey(opened, arena_dir), every, as_json=as_json, on_screen=on_screen, limit=limit)
        return EXIT_OK
    view = survey(opened, arena_dir)
    if as_json:
        emit(view.to_json(limit), as_json=True)
        return EXIT_OK
    from scarctl.cli.inspect_view import draw, plain

    if on_screen:
        from rich.console import Console

        draw(view, Console())
    else:
        emit({}, as_json=False, text=plain(view))
    return EXIT_OK
