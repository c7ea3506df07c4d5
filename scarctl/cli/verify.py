"""`scarctl verify`: check every file of a store."""

from __future__ import annotations

import sys
import time

import click

from scarctl.cli.output import EXIT_CORRUPT, EXIT_OK, common_options, emit, human_bytes, note, open_store
from scarctl.errors import UsageError

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
    a crash. Exit code 13: there are problems.
    """
    from scarctl.store import verify
    from scarctl.store.subset import Subset

    part = read_data_subset
    if part is not None and not read_data:
        raise UsageError("--read-data-subset cannot be combined with --no-read-data")
    subset = None if part is None else Subset.parse(part)
    opened = open_store(store)
    report = verify(opened, read_data=read_data, subset=subset, progress=_Progress())
    problems = [{"file": p.file, "partition": p.partition, "reason": p.reason} for p in report.problems]
    fields = {
        "intact": not problems,
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
    looked = f"{report.files} files, {human_bytes(report.bytes)}, {report.records} records, {report.segments} segments"
    verdict = f"{len(problems)} problem{'s' * (len(problems) > 1)}" if problems else "intact"
    if not read_data:
        verdict += ", data not read"
    elif part is not None:
        verdict += f"; {human_bytes(report.data_bytes)} of data read ({part})"
    emit(fields, as_json=as_json, text="\n".join([*lines, f"{looked}: {verdict}"]))
    if problems:
        note("`scarctl recover` uses older intact copies of damaged partitions; saving again replaces them")
    return EXIT_CORRUPT if problems else EXIT_OK


class _Progress:
    """Show progress on stderr: in place on a terminal twice a second, otherwise as a line every 30 seconds."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._pause = 0.5 if self._terminal else 30.0
        self._next = time.monotonic() + self._pause
        self._shown = False

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() < self._next and not (self._shown and done >= total):
            return
        self._next = time.monotonic() + self._pause
        text = f"verified {human_bytes(done)} of {human_bytes(total)}"
        if not self._terminal:
            note(text)
            return
        click.echo(f"\r\x1b[K{'' if done >= total else text}", err=True, nl=False)
        self._shown = done < total
