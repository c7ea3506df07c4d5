"""`scarctl verify`: check every file of a store."""

from __future__ import annotations

from pathlib import Path

import click

from scarctl.cli.checkpoints import chosen, store_or_checkpoint, verified_lines
from scarctl.cli.groups import Command
from scarctl.cli.output import EXIT_CORRUPT, EXIT_OK, emit, human_bytes, note, open_store
from scarctl.cli.progress import Progress
from scarctl.errors import NoIntactCopy, UsageError
from scarctl.util.text import counted

EXAMPLES = """\b
Examples:
  scarctl verify --store ckpt
  scarctl verify model.safetensors --finite
  scarctl verify --store ckpt --no-read-data --json
  scarctl verify --store s3://bucket/run --read-data-subset 2/7
"""
_SHOWN = 100


@click.command(cls=Command, epilog=EXAMPLES)
@click.option(
    "--read-data/--no-read-data",
    default=True,
    show_default=True,
    help="Read all data and compare every partition's checksum.",
)
@click.option(
    "--read-data-subset",
    metavar="PART",
    help="Read only this part of the data: 2/7 is the second of seven parts, 5% is chosen at random.",
)
@click.option("--finite", is_flag=True, help="CHECKPOINT: a value that is NaN or infinite is a problem.")
@store_or_checkpoint
def command(
    store: str | None,
    checkpoint: str | None,
    read_data: bool,
    read_data_subset: str | None,
    finite: bool,
    as_json: bool,
    debug: bool,
) -> int:
    """Check every record, segment and checksum of a store, or the structure of CHECKPOINT.

    CHECKPOINT is a safetensors or .pt file, a DCP folder, or a folder of safetensors files with an index. Its headers
    and files are compared with each other, and values that are NaN or infinite are counted.

    Each problem names the file, the partition or tensor, and the reason. Segments that no record names are harmless
    left-overs of a crash. Exit code 13: there are problems. 16: the store is empty, so there is
    nothing to recover from.
    """
    part = read_data_subset
    if part is not None and not read_data:
        raise UsageError("--read-data-subset cannot be combined with --no-read-data")
    store, checkpoint = chosen(store, checkpoint)
    if checkpoint is not None:
        if part is not None:
            raise UsageError("--read-data-subset is for stores", hint="a checkpoint is read as a whole")
        return _of_file(checkpoint, read_data, finite, as_json)
    if finite:
        raise UsageError("--finite is for a CHECKPOINT that is not a store")
    assert store is not None
    return _of_store(store, read_data, part, as_json)


def _of_file(checkpoint: str, read_data: bool, finite: bool, as_json: bool) -> int:
    from scarctl.ops.verify_file import verify_file

    found = verify_file(Path(checkpoint), read_data=read_data, finite=finite, progress=Progress("verified"))
    emit(found.to_json(), as_json=as_json, text="\n".join(verified_lines(found)))
    return EXIT_CORRUPT if found.faults else EXIT_OK


def _of_store(store: str, read_data: bool, part: str | None, as_json: bool) -> int:
    from scarctl.store import verify
    from scarctl.store.subset import Subset

    subset = None if part is None else Subset.parse(part)
    opened = open_store(store)
    report = verify(opened, read_data=read_data, subset=subset, progress=Progress("verified"))
    problems = [{"file": p.file, "partition": p.partition, "reason": p.reason} for p in report.problems]
    empty = not problems and not any(opened.state(shard).step >= 0 for shard in opened.shards())
    fields = {
        "intact": not problems and not empty,
        "empty": empty,
        "read_data": read_data,
        "read_data_subset": part,
        "data_bytes": report.data_bytes,
        "files": report.files,
        "bytes": report.bytes,
        "records": report.records,
        "segments": report.segments,
        "orphans": len(report.orphans),
        "damaged_partitions": report.damaged_partitions,
        "problems": problems,
    }
    lines = [
        f"{p['file']}: {p['partition'] + ': ' if p['partition'] else ''}{p['reason']}"
        for p in problems[:_SHOWN]
    ]
    if len(problems) > _SHOWN:
        lines.append(f"and {len(problems) - _SHOWN} more problems: --json names all")
    looked = (
        f"{counted(report.files, 'file')}, {human_bytes(report.bytes)}, {counted(report.records, 'record')}, "
        f"{counted(report.segments, 'segment')}"
    )
    verdict = counted(len(problems), "problem") if problems else "intact"
    if empty:
        verdict = "empty, nothing to verify"
    if not read_data:
        verdict += ", data not read"
    elif part is not None:
        verdict += f"; {human_bytes(report.data_bytes)} of data read ({part})"
    emit(fields, as_json=as_json, text="\n".join([*lines, f"{looked}: {verdict}"]))
    if problems:
        note("`scarctl recover` uses older intact copies of damaged partitions; saving again replaces them")
    if empty:
        note("nothing has been saved to this store yet: nothing can be recovered from it")
        return NoIntactCopy.exit_code
    return EXIT_CORRUPT if problems else EXIT_OK
