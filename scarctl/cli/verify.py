"""`scarctl verify`: check every file of a store."""

from __future__ import annotations

import click

from scarctl.cli.output import EXIT_CORRUPT, EXIT_OK, common_options, emit, human_bytes, note, open_store
from scarctl.cli.progress import Progress
from scarctl.errors import NoIntactCopy, UsageError
from scarctl.util.text import counted

EXAMPLES = """\b
Examples:
  scarctl verify --store ckpt
  scarctl verify --store ckpt --no-read-data --json
  scarctl verify --store s3://bucket/run --read-data-subset 2/7
"""
_SHOWN = 100


@click.command(epilog=EXAMPLES)
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
@common_options
def command(store: str, read_data: bool, read_data_subset: str | None, as_json: bool, debug: bool) -> int:
    """Check every record, segment and checksum of a store.

    Each problem names the file, the partition and the reason. Segments that no record names are harmless left-overs of
    a crash. Exit code 13: there are problems. 16: the store is empty, so there is nothing to recover from.
    """
    from scarctl.store import verify
    from scarctl.store.subset import Subset

    part = read_data_subset
    if part is not None and not read_data:
        raise UsageError("--read-data-subset cannot be combined with --no-read-data")
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
