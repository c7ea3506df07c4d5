"""Define `scarctl export`: write a state in a format that other tools read."""

from __future__ import annotations

from pathlib import Path

import click

from scarctl.cli.given import refuse
from scarctl.cli.output import (
    EXIT_OK,
    EXIT_PARTLY,
    common_options,
    emit,
    human_bytes,
    note,
    options_for,
    warn,
)
from scarctl.cli.progress import Progress
from scarctl.cli.units import WholeSize
from scarctl.util.text import counted

EXAMPLES = """\b
Examples:
  scarctl export --store ckpt out
  scarctl export --store ckpt out --max-shard-size 2GB --json
  scarctl export --store ckpt best.pt --snapshot best --format pt
  scarctl export --store ckpt best-dcp --snapshot best --format dcp
"""


@click.command(epilog=EXAMPLES)
@click.argument("output", type=click.Path(path_type=Path))
@click.option(
    "--snapshot",
    metavar="NAME",
    help="This snapshot.  [default: the newest copies]",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["safetensors", "pt", "dcp"]),
    default="safetensors",
    show_default=True,
    help="A folder of safetensors files, one .pt file of plain tensors, or a DCP folder.",
)
@click.option(
    "--max-shard-size",
    type=WholeSize(),
    default="5GB",
    show_default=True,
    metavar="SIZE",
    help="Bytes of tensors per safetensors file.",
)
@common_options
def command(
    output: Path,
    store: str,
    snapshot: str | None,
    form: str,
    max_shard_size: int,
    as_json: bool,
    debug: bool,
) -> int:
    """Write the running checkpoint, or a snapshot, to OUTPUT for other tools.

    OUTPUT appears when it is whole. Several safetensors files come with an index, as Hugging Face's do. Tensors are
    named as in the store: `layers.3.weight`, `layers.3.weight/exp_avg`. Without --snapshot steps may be mixed; the
    answer says so. Exit code 3: an older copy than the newest one had to be taken.
    """
    from scarctl.ops.export import ExportSettings, export

    if form == "pt":
        refuse("max_shard_size", why="splits safetensors and DCP; a .pt file is one file")
    done = export(
        ExportSettings(
            store=store,
            storage_options=options_for(store),
            output=output,
            snapshot=snapshot,
            format=form,
            max_shard_bytes=max_shard_size,
        ),
        progress=Progress("exported"),
    )
    for problem in done.problems:
        warn(problem)
    label = (
        f"exact, of step {done.step}"
        if done.exact
        else f"mixed, of steps {done.oldest_step} to {done.newest_step}"
    )
    emit(
        {**done.to_json(), "format": form, "snapshot": snapshot},
        as_json=as_json,
        text=f"wrote {counted(done.tensors, 'tensor')}, {human_bytes(done.bytes)}, to {output} "
        f"({counted(len(done.files), 'file')}): {label}",
    )
    if done.degraded:
        note("exit code 3: the newest copy of something is damaged, an older one was taken")
    return EXIT_PARTLY if done.degraded else EXIT_OK
