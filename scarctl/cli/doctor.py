"""`scarctl doctor`: test the guarantees of a place for a store, and its speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from scarctl.cli.groups import Command
from scarctl.cli.output import (
    EXIT_NO_GUARANTEE,
    EXIT_OK,
    common_options,
    emit,
    human_bytes,
    note,
    options_for,
)

if TYPE_CHECKING:
    from scarctl.store.doctor import Diagnosis

EXAMPLES = """\b
Examples:
  scarctl doctor --store ckpt
  scarctl doctor --store s3://bucket/ckpt --json
"""


@click.command(cls=Command, epilog=EXAMPLES)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Number of races of 16 writers for one file.",
)
@common_options
def command(store: str, rounds: int, as_json: bool, debug: bool) -> int:
    """Test a place for a store: its guarantees, their consequences, and its speed.

    This creates files in a folder of its own, and deletes them. An existing store is not touched. Exit code 14: a
    guarantee is missing that commits rely on.
    """
    from scarctl.store.doctor import diagnose

    found = diagnose(store, storage_options=options_for(store), rounds=rounds, progress=note)
    emit(found.to_json(), as_json=as_json, text=_text(found))
    return EXIT_OK if found.sound else EXIT_NO_GUARANTEE


def _text(found: Diagnosis) -> str:
    content = "contains a store" if found.has_store else "contains no store yet"
    lines = [f"{found.where}: {'a local folder' if found.local else 'remote'}, {content}"]
    lines += [f"  {'ok  ' if check.ok else 'FAIL'}  {check.name}: {check.detail}" for check in found.checks]
    for name, latency in (("small put", found.put), ("small get", found.get)):
        if latency is not None:
            lines.append(f"  {name}: median {1000 * latency.median:.1f} ms, p95 {1000 * latency.p95:.1f} ms")
    for name, bandwidth in (("write", found.write_bandwidth), ("read", found.read_bandwidth)):
        if bandwidth is not None:
            lines.append(f"  {name}: {human_bytes(int(bandwidth))}/s")
    lines += [f"  could not be deleted: {name}" for name in found.left_behind]
    return "\n".join([*lines, _meaning(found)])


def _meaning(found: Diagnosis) -> str:
    if not found.exclusive:
        return (
            "two writers would overwrite each other's commits here: scarctl refuses the place without "
            "--assume-single-writer"
        )
    if not found.sound:
        return "unsafe: committed checkpoints might not be found again. Do not use this place"
    if found.local:
        return "safe: a lock admits one writer at a time; a commit is durable when it returns"
    return (
        "safe without a lock: a second writer takes over, and the first one notices at its next commit; "
        "acknowledged checkpoints are never lost"
    )
