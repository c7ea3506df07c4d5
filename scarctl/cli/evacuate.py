"""Define `scarctl evacuate`: save a host's memory to other hosts and the store, before the host shuts down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from scarctl.cli.given import chosen_store
from scarctl.cli.output import (
    EXIT_OK,
    EXIT_PARTLY,
    arena_option,
    emit,
    note,
    output_options,
    store_option,
)
from scarctl.util.text import human_bytes

if TYPE_CHECKING:
    from scarctl.daemon.status import RunStatus
    from scarctl.ops.evacuate import Host, Store

EXAMPLES = """\b
Examples:
  scarctl evacuate --deadline 25s --all
  scarctl evacuate --deadline 100s --store ckpt --json
  scarctl evacuate --deadline 25s --all --to node7
"""


@click.command(epilog=EXAMPLES)
@click.option(
    "--deadline",
    required=True,
    metavar="DURATION",
    help="Time until the host shuts down, such as 25s or 2m. The command ends earlier.",
)
@store_option(about="Evacuate the processes that save to this store, all of its ranks on this host.")
@click.option("--all", "everything", is_flag=True, help="Evacuate all processes that save on this host.")
@click.option(
    "--to",
    metavar="HOST",
    help="Host of the same job to save to first, then the store; `store`: the store alone. "
    "Default: the hosts that keep copies of this one's memory, then the store.",
)
@click.option("--dry-run", is_flag=True, help="Only print what would be evacuated.")
@arena_option
@output_options
def command(
    deadline: str, store: str | None, everything: bool, to: str | None, dry_run: bool, arena_dir: str | None
) -> int:
    """Save this host's memory to other hosts and the store, before the host shuts down.

    The sessions on this host bring their newest step into memory. Then the daemon sends what exists only here to
    the hosts that keep copies, and to the stores, in commits that end before the deadline. Partitions that changed
    most per byte come first. Each commit is safe once it is made, even if the host shuts down early. Training
    continues without checkpoints until the deadline. So `--store URL` or `--all` says whose training that is.

    Exit code 0: all is safe. 3: partly safe; the command reports what would be lost, and the predicted rework.
    """
    from scarctl.config.checks import notice_of
    from scarctl.ops.evacuate import evacuate_host, evacuees
    from scarctl.ops.known import described, unchosen

    seconds = notice_of("--deadline", deadline)
    wanted = chosen_store(store, everything=everything)
    if store is None and not everything:
        raise unchosen("evacuate", *evacuees(arena_dir, None))
    if dry_run:
        runs, waiting = evacuees(arena_dir, wanted)
        fields = {"deadline": seconds, "dry_run": True, "runs": runs, "in_memory": list(waiting)}
        lines = [f"would evacuate {described(run)}" for run in runs] + _waiting_lines(waiting)
        emit(fields, text="\n".join(lines) or "nothing would be evacuated")
        return EXIT_OK

    def told(runs: Sequence[RunStatus]) -> None:
        for run in runs:
            note(f"evacuating {described(run)}")

    host = evacuate_host(seconds, arena_dir=arena_dir, store=wanted, to=to, before_it=told)
    fields = {
        "deadline": seconds,
        "safe": host.safe,
        "stores": [one.to_json() for one in host.stores],
        "in_memory": list(host.in_memory),
    }
    emit(fields, text="\n".join(_lines(host)))
    if host.safe:
        return EXIT_OK
    note("exit code 3: losing this host now would lose what is named above")
    return EXIT_PARTLY


def _lines(host: Host) -> list[str]:
    lines = [line for store in host.stores for line in _of_store(store)]
    lines += _waiting_lines(host.in_memory)
    return lines or [
        f"nothing to evacuate in {host.folder}: no session saves through the daemon there, and nothing waits in "
        "memory. A session with another arena_dir, or of another user, has another folder"
    ]


def _waiting_lines(folders: Sequence[str]) -> list[str]:
    unsaved = "copies that no daemon saves; the next session of that run on this host does"
    return [f"{folder}: {unsaved}" for folder in folders]


def _of_store(store: Store) -> list[str]:
    found = [process.found for process in store.processes if process.found is not None]
    total, lost = sum(one.total_bytes for one in found), sum(one.lost_bytes for one in found)
    written = sum(one.written_bytes for one in found)
    step = max((one.step for one in found), default=-1)
    there = sum(one.peer_bytes for one in found)
    label = store.label
    stored = not there and (not label.of_one or all(one.sealed for one in found))
    how = f"{' in the store' if stored else ''}{f' ({label.text})' if label.of_one else ''}"
    head = f"{store.url}: step {step}: {human_bytes(total - lost)} of {human_bytes(total)} are safe{how}"
    lines = [
        f"{head}; {human_bytes(written)} written now" if found else f"{store.url}: what is safe is not known"
    ]
    if there:
        hosts = ", ".join(sorted({host for one in found for host in one.peers}))
        lines.append(f"  {human_bytes(there)} of it only in the memory of {hosts}: not in the store yet")
    if found and not store.safe:
        partitions = sum(one.lost_partitions for one in found)
        what = f"{partitions} partitions, {human_bytes(lost)}"
        lines.append(f"  lost with this host: {what}; predicted rework {_rework(store)}")
    for process in store.processes:
        who = process.name
        if process.found is None:
            lines.append(f"  {who}: {process.error}")
            continue
        if not process.found.flushed:
            lines.append(
                f"  {who}: its newest step was not brought into memory: iterations after it are lost as well"
            )
        if process.found.extras_lost:
            lines.append(
                f"  {who}: its newest step counters, random states and other extras are lost as well"
            )
        if process.found.error and not process.safe:
            lines.append(f"  {who}: {process.found.error}")
    return lines


def _rework(store: Store) -> str:
    rework = store.rework
    return f"{rework} iterations" if rework.iterations is not None else f"unknown ({rework.reason})"
