"""`scarctl inspect`: show a store's copies, their ages, and the effect of losing a shard; or a checkpoint's tensors."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from scarctl.cli.checkpoints import chosen, inspected, inspected_lines, store_or_checkpoint
from scarctl.cli.given import refuse
from scarctl.cli.groups import Command
from scarctl.cli.output import EXIT_OK, EXIT_PARTLY, Seconds, arena_option, emit, note, open_store, wants_json
from scarctl.errors import UsageError

if TYPE_CHECKING:
    from scarctl.ops.surveyed import Survey

EXAMPLES = """\b
Examples:
  scarctl inspect --store ckpt
  scarctl inspect --store ckpt --json --limit all
  scarctl inspect --store ckpt --watch --every 10
  scarctl inspect model.safetensors --values
"""


class Limit(click.ParamType[Any]):
    """A number of rows that are listed, or all."""

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


@click.command(cls=Command, epilog=EXAMPLES)
@click.option(
    "--limit",
    type=Limit(),
    default="1000",
    show_default=True,
    metavar="N|all",
    help="Partitions that --json lists; tensors of CHECKPOINT that are listed.",
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
@click.option(
    "--values", is_flag=True, help="CHECKPOINT: read it, and show norms and values that are not finite."
)
@store_or_checkpoint
def command(
    store: str | None,
    checkpoint: str | None,
    values: bool,
    limit: int | None,
    arena_dir: str | None,
    follow: bool,
    every: float,
) -> int:
    """Show a store's copies, their ages and sizes, and the predicted effect of losing each shard.

    CHECKPOINT is a safetensors or .pt file, a DCP folder, a folder of safetensors files with an index, or STORE@NAME.
    Its tensors are listed.

    Distances and the newest step of a run are known as long as its arena is on this host. With --watch, --json prints
    one document per line; it lists no partitions unless --limit asks for them.
    """
    store, checkpoint = chosen(store, checkpoint)
    if checkpoint is not None:
        if follow:
            raise UsageError("--watch is for stores")
        fields = inspected(checkpoint, values, limit)
        emit(fields, text="\n".join(inspected_lines(fields)))
        return EXIT_OK
    if values:
        raise UsageError("--values is for a CHECKPOINT", hint="give STORE@NAME for the tensors of a snapshot")
    assert store is not None
    from scarctl.ops.survey import survey

    if not follow:
        refuse("every", why="requires --watch")
    if not wants_json():
        refuse("limit", why="requires --json: tables show the partitions at most risk")
    opened = open_store(store)
    on_screen = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    if follow:
        from scarctl.cli.watch import watch

        if click.get_current_context().get_parameter_source("limit") is click.core.ParameterSource.DEFAULT:
            limit = 0
        watch(lambda: survey(opened, arena_dir), every, on_screen=on_screen, limit=limit)
        return EXIT_OK
    view = survey(opened, arena_dir)
    _show(view, limit, on_screen)
    if view.damage:
        note("exit code 3: files that the newest copies need are damaged; `scarctl verify` lists all damage")
        return EXIT_PARTLY
    return EXIT_OK


def _show(view: Survey, limit: int | None, on_screen: bool) -> None:
    if wants_json():
        emit(view.to_json(limit))
        return
    from scarctl.cli.inspect_view import draw, plain

    if on_screen:
        from rich.console import Console

        draw(view, Console())
    else:
        emit({}, text=plain(view))
