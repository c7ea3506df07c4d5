"""`scarctl verify`: check every file of a store."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from scarctl.cli.checkpoints import chosen, memory_lines, store_or_checkpoint, verified_lines
from scarctl.cli.output import EXIT_CORRUPT, EXIT_OK, arena_option, emit, note, open_store
from scarctl.cli.progress import Progress
from scarctl.errors import Corruption, NoIntactCopy, UsageError
from scarctl.util.document import json_of
from scarctl.util.text import counted, human_bytes

if TYPE_CHECKING:
    from scarctl.store import Store

EXAMPLES = """\b
Examples:
  scarctl verify --store ckpt
  scarctl verify model.safetensors --finite
  scarctl verify --store ckpt --no-read-data --json
  scarctl verify --store s3://bucket/run --read-data-subset 2/7
  scarctl verify --store ckpt --memory
"""
_SHOWN = 100
_SKIPPED = "memory was not compared: the store's own records are damaged"


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
@click.option(
    "--memory",
    is_flag=True,
    help="Also compare the copies in this host's memory, replicas of other hosts included, with the store's records.",
)
@arena_option
@click.option("--finite", is_flag=True, help="CHECKPOINT: a value that is NaN or infinite is a problem.")
@store_or_checkpoint
def command(
    store: str | None,
    checkpoint: str | None,
    read_data: bool,
    read_data_subset: str | None,
    memory: bool,
    arena_dir: str | None,
    finite: bool,
) -> int:
    """Check every record, segment and checksum of a store, or the structure of CHECKPOINT.

    CHECKPOINT is a safetensors or .pt file, a DCP folder, or a folder of safetensors files with an index. Its headers
    and files are compared with each other, and values that are NaN or infinite are counted.

    Each problem names the file, the partition or tensor, and the reason. Segments that no record names are harmless
    leftovers of a crash. Exit code 13: there are problems, or damaged copies in memory. 16: the store is empty, so
    there is nothing to recover from.
    """
    part = read_data_subset
    if part is not None and not read_data:
        raise UsageError("--read-data-subset cannot be combined with --no-read-data")
    store, checkpoint = chosen(store, checkpoint)
    if checkpoint is not None:
        if part is not None:
            raise UsageError("--read-data-subset is for stores", hint="a checkpoint is read completely")
        if memory:
            raise UsageError("--memory is for stores: a checkpoint has no copies in memory")
        return _of_file(checkpoint, read_data, finite)
    if finite:
        raise UsageError("--finite is for a CHECKPOINT that is not a store")
    assert store is not None
    return _of_store(store, read_data, part, arena_dir if memory else False)


def _of_file(checkpoint: str, read_data: bool, finite: bool) -> int:
    from scarctl.ops.verify_file import verify_file

    found = verify_file(Path(checkpoint), read_data=read_data, finite=finite, progress=Progress("verified"))
    emit(found.to_json(), text="\n".join(verified_lines(found)))
    return EXIT_CORRUPT if found.problems else EXIT_OK


def _of_store(store: str, read_data: bool, part: str | None, memory: str | Literal[False] | None) -> int:
    """memory: the folder of the arenas that are compared, too; False: none are."""
    from scarctl.ops.verify_memory import verify_memory
    from scarctl.store import verify
    from scarctl.store.subset import Subset

    subset = None if part is None else Subset.parse(part)
    opened = open_store(store)
    report = verify(opened, read_data=read_data, subset=subset, progress=Progress("verified"))
    problems = report.problems
    copies = [] if memory is False or problems else verify_memory(opened, memory)
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
        "problems": json_of(problems),
        "memory": json_of(copies),
    }
    lines = [
        f"{one.file}: {one.partition + ': ' if one.partition else ''}{one.reason}"
        for one in problems[:_SHOWN]
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
    lines = [*lines, f"{looked}: {verdict}", *memory_lines(copies)]
    if memory is not False and not copies:
        lines.append("no copies of this store's runs in this host's memory" if not problems else _SKIPPED)
    emit(fields, text="\n".join(lines))
    damaged = any(copy.damaged for copy in copies)
    if damaged:
        note(
            "delete the folder of a damaged copy before a run resumes from it: the store's copies are intact"
        )
    if problems:
        note(_advice(opened))
    if empty:
        note("nothing has been saved to this store yet: nothing can be recovered from it")
        return NoIntactCopy.exit_code
    return EXIT_CORRUPT if problems or damaged else EXIT_OK


def _advice(store: Store) -> str:
    """Return what to do about a damaged store."""

    try:
        store.states(store.shards())
    except Corruption as error:
        # Unlike a damaged copy, this file cannot be replaced by an older one: it says which copies are the newest.
        back = (
            f"nothing more can be saved here: {error.message}. Put that file back from a copy of this store"
        )
        left = False
        with contextlib.suppress(Corruption):
            left = all(store.state(shard, around=True).saved.all() for shard in store.shards())
        if left:
            return f"{back}. Without one, `scarctl recover --lost all --output FILE` saves what other records name"
        return f"{back}. Without one, the tensors are in lanes/*/seg, as safetensors"
    return (
        "`scarctl recover` uses older intact copies of damaged partitions, if the store has any; "
        "saving again replaces them"
    )
