"""`scarctl inspect`: show a store's copies, their ages, and the effect of losing a shard; or a checkpoint's tensors."""

from __future__ import annotations

import shutil
import sys
from typing import Any

import click

from scarctl.cli.checkpoints import chosen, inspected, inspected_lines, store_or_checkpoint
from scarctl.cli.given import refuse
from scarctl.cli.output import EXIT_OK, EXIT_PARTLY, arena_option, emit, note, open_store, wants_json
from scarctl.errors import UsageError

EXAMPLES = """\b
Examples:
  scarctl inspect --store ckpt
  scarctl inspect --store ckpt --json --limit all
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


@click.command(epilog=EXAMPLES)
@click.option(
    "--limit",
    type=Limit(),
    default="1000",
    show_default=True,
    metavar="N|all",
    help="Partitions that --json lists; tensors of CHECKPOINT that are listed.",
)
@arena_option
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
) -> int:
    """Show a store's copies, their ages and sizes, and the predicted effect of losing each shard.

    CHECKPOINT is a safetensors or .pt file, a DCP folder, a folder of safetensors files with an index, or STORE@NAME.
    Its tensors are listed.

    Distances and the newest step of a run are known as long as its arena is on this host.
    """
    store, checkpoint = chosen(store, checkpoint)
    if checkpoint is not None:
        fields = inspected(checkpoint, values, limit)
        emit(fields, text="\n".join(inspected_lines(fields)))
        return EXIT_OK
    if values:
        raise UsageError("--values is for a CHECKPOINT", hint="give STORE@NAME for the tensors of a snapshot")
    assert store is not None
    from scarctl.cli.inspect_view import plain
    from scarctl.ops.survey import survey

    if not wants_json():
        refuse("limit", why="requires --json: tables show the partitions at most risk")
    view = survey(open_store(store), arena_dir)
    if wants_json():
        emit(view.to_json(limit))
    else:
        emit({}, text=plain(view, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    if view.damage:
        note("exit code 3: files that the newest copies need are damaged; `scarctl verify` lists all damage")
        return EXIT_PARTLY
    return EXIT_OK
