"""Define `scarctl export`: write a state in a format that other tools read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from scarctl.cli.given import refuse
from scarctl.cli.output import (
    EXIT_OK,
    EXIT_PARTLY,
    common_options,
    emit,
    note,
    options_for,
    warn,
)
from scarctl.cli.progress import Progress
from scarctl.cli.units import WholeSize
from scarctl.util.text import counted, human_bytes

EXAMPLES = """\b
Examples:
  scarctl export --store ckpt out
  scarctl export --store ckpt out --max-shard-size 2GB --json
  scarctl export --store ckpt best.pt --snapshot best
  scarctl export --store ckpt model.safetensors --weights
  scarctl export --store ckpt best-dcp --snapshot best --format dcp
"""


@click.command(epilog=EXAMPLES)
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--snapshot", metavar="NAME", help="This snapshot.  [default: the newest copies]")
@click.option(
    "--format",
    type=click.Choice(["safetensors", "pt", "dcp"]),
    help="safetensors, one .pt file of plain tensors, or a DCP folder.  [default: by OUTPUT's ending, or safetensors]",
)
@click.option(
    "--weights", is_flag=True, help="Only the model's own state_dict(), tied tensors under all their names."
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
def command(output: Path, store: str, max_shard_size: int, **options: Any) -> int:
    """Write the running checkpoint, or a snapshot, to OUTPUT for other tools.

    OUTPUT appears once it is complete: a .pt file, one .safetensors file, or a folder. Several safetensors files come
    with an index, as Hugging Face's do. Tensors are named as in the store: `layers.3.weight`,
    `layers.3.weight/exp_avg`. With --weights they are what the model's `load_state_dict(strict=True)` and
    `from_pretrained` take.

    Without --snapshot steps may be mixed; the answer says so. Exit code 3: an older copy than the newest one had to be
    taken.
    """
    from scarctl.ops.export import ExportSettings, export

    settings = ExportSettings(
        store=store,
        storage_options=options_for(store),
        output=output,
        max_shard_bytes=max_shard_size,
        **options,
    )
    if settings.one_file:
        refuse("max_shard_size", why=f"splits the files of a folder, and {output.name} is one file")
    done = export(settings, progress=Progress("exported"))
    for problem in done.problems:
        warn(problem)
    emit(
        done.to_json(),
        text=f"wrote {counted(done.tensors, 'tensor')}, {human_bytes(done.bytes)}, to {output} "
        f"({counted(len(done.files), 'file')}): {done.label}",
    )
    if done.degraded:
        note("exit code 3: the newest copy of something is damaged, an older one was taken")
    return EXIT_PARTLY if done.degraded else EXIT_OK
