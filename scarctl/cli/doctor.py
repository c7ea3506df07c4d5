"""`scarctl doctor`: what a place for a store guarantees, and how fast it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

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


@click.command(epilog=EXAMPLES)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    envvar="SCARCTL_ROUNDS",
    help="How often 16 writers race for one file.",
)
@common_options
def command(store: str, rounds: int, as_json: bool, debug: bool) -> int:
    """Try out a place for a store: what it guarantees, what that means, and how fast it is.

    It creates files there, in a folder of its own, and deletes them; a store that is there is not touched. Exit code
    14 when something is missing that commits rely on.
    """
    from scarctl.store.doctor import diagnose

    found = diagnose(store, storage_options=options_for(store), rounds=rounds, progress=note)
    emit(found.to_json(), as_json=as_json, text=_text(found))
    return EXIT_OK if found.sound else EXIT_NO_GUARANTEE


def _text(found: Diagnosis) -> str:
    there = "a store is there" if found.has_store else "no store is there yet"
    lines = [f"{found.where}: {'a local folder' if found.local else 'remote'}, {there}"]
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
            "two writers would overwrite each other's commits here: scarctl refuses the place, unless it is told "
            "--assume-single-writer"
        )
    if not found.sound:
        return "what was committed might not be found again here: do not use it"
    if found.local:
        return "safe: one writer at a time, kept apart by a lock; a commit is durable when it returns"
    return (
        "safe: there is no lock, but a second writer takes over and the first one learns of it at its next commit; "
        "what was acknowledged is never lost"
    )
