"""`scarctl prune`: delete old copies, sealed states and leftovers that need not be kept."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import click

from scarctl.cli.given import refuse
from scarctl.cli.output import EXIT_OK, emit, note, on_store, open_store, say, wants_json
from scarctl.errors import UsageError
from scarctl.util.text import counted, human_bytes

if TYPE_CHECKING:
    from scarctl.store.prune import Pruned, PrunePlan, Retention

F = TypeVar("F", bound=Callable[..., object])

EXAMPLES = """\b
Examples:
  scarctl prune --store ckpt --dry-run
  scarctl prune --store ckpt --keep-last 3 --yes
  scarctl prune --store ckpt --keep best --keep 'epoch-*0' --yes --json
  scarctl prune --store s3://bucket/run --no-writer --yes
"""


def deleting_options(command: F) -> F:
    """Add the options of every command that deletes: `--keep-last`, `--keep-every`, `--dry-run` and `--yes`."""
    for option in (
        click.option("--yes", is_flag=True, help="Delete without asking."),
        click.option("--dry-run", is_flag=True, help="Show the files that would be deleted; delete nothing."),
        click.option(
            "--keep-every", type=int, metavar="N", help="Also keep the first sealed state of every N steps."
        ),
        click.option(
            "--keep-last",
            type=int,
            default=1,
            show_default=True,
            metavar="N",
            help="Number of sealed states to keep, the newest ones.",
        ),
    ):
        command = option(command)
    return command


@click.command(epilog=EXAMPLES)
@deleting_options
@click.option(
    "--keep",
    multiple=True,
    metavar="NAME",
    help="Delete the snapshots that match no --keep (a name or pattern).  [default: keep all]",
)
@click.option(
    "--no-writer",
    is_flag=True,
    help="Collect a remote store to which nothing writes now. A writer that is alive nevertheless is fenced.",
)
@on_store
def command(
    store: str,
    keep_last: int,
    keep_every: int | None,
    keep: tuple[str, ...],
    no_writer: bool,
    dry_run: bool,
    yes: bool,
) -> int:
    """Delete old copies, records and sealed states that need not be kept.

    The newest copy of everything and the newest sealed state always stay. A running session keeps its store small;
    alongside it, only snapshots and leftovers of dead writers are deleted here. A remote store does not show
    whether a session runs: give --no-writer when the run is over. `scarctl snapshot delete` deletes snapshots by name.
    """
    from scarctl.store.prune import Retention

    if "://" not in store or store.startswith("file:"):
        refuse("no_writer", why="applies to remote stores: a folder shows whether a session writes to it")
    retention = Retention(keep_last=keep_last, keep_every=keep_every, keep=keep, no_writer=no_writer)
    return delete_old(store, retention, dry_run=dry_run, yes=yes)


def delete_old(store: str, retention: Retention, *, dry_run: bool, yes: bool) -> int:
    """Delete obsolete files, after asking unless `yes`; print them, and return the exit code."""
    from scarctl.store.prune import Pruned, plan_prune, prune

    if dry_run:
        refuse("yes", why="deletes, and --dry-run deletes nothing", hint="give one of them")
    opened = open_store(store)
    plan = plan_prune(opened, retention)
    if dry_run:
        done = Pruned(len(plan.files) + len(plan.hosts), plan.bytes)
    else:
        if not yes and not plan.empty:
            _ask(plan)
        done = prune(opened, plan)
    _report(plan, done, dry_run=dry_run)
    return EXIT_OK


def _report(plan: PrunePlan, done: Pruned, *, dry_run: bool) -> None:
    """Print the deleted files, and the freed bytes."""
    emit(
        {
            **plan.to_json(),
            "files": done.files,
            "freed_bytes": done.bytes,
            "moved_bytes": done.moved_bytes,
            "bytes": done.sizes.get("bytes"),
            "live_bytes": done.sizes.get("live_bytes"),
            "dry_run": dry_run,
        },
        text=_text(plan, done, dry_run),
    )
    if plan.writer is not None:
        note(f"{plan.writer}; it collects old copies automatically")


def _ask(plan: PrunePlan) -> None:
    if wants_json() or not sys.stdin.isatty():
        raise UsageError("this deletes files", hint="give --yes, or look first with --dry-run")
    say("\n".join(_lines(plan, "will be")))
    click.confirm("Delete?", abort=True, err=True)


def _lines(plan: PrunePlan, verb: str) -> list[str]:
    lines = [f"snapshot {s.name}, of step {s.step}, {verb} deleted" for s in plan.delete_snapshots]
    lines += [f"snapshot {s.name}, of step {s.step}, is kept" for s in plan.keep_snapshots]
    gone = f"{'were' if verb == 'was' else verb} given up"
    for word, sets in (("are kept", plan.keep_sealed), (gone, plan.drop_sealed)):
        if sets:
            steps = ", ".join(str(s.step) for s in sets[:20]) + (", ..." if len(sets) > 20 else "")
            lines.append(f"sealed states that {word}: {'step' if len(sets) == 1 else 'steps'} {steps}")
    if plan.hosts:
        verbs = "were" if verb == "was" else verb
        lines.append(f"records of hosts that are gone, which {verbs} deleted: {len(plan.hosts)}")
    if plan.retire:
        lines.append(f"shards of earlier ranks that {gone}: {', '.join(map(str, plan.retire))}")
    return lines


def _text(plan: PrunePlan, done: Pruned, dry_run: bool) -> str:
    lines = _lines(plan, "would be" if dry_run else "was")
    if dry_run:
        lines.append(
            f"would delete {counted(done.files, 'file')}, {human_bytes(done.bytes)}; compaction may free more"
        )
    else:
        now, live = done.sizes["bytes"], done.sizes["live_bytes"]
        change = (
            f"freed {human_bytes(done.bytes)}" if done.bytes >= 0 else f"grew by {human_bytes(-done.bytes)}"
        )
        lines.append(
            f"deleted {counted(done.files, 'file')}, moved {human_bytes(done.moved_bytes)}: {change}; "
            f"on disk {human_bytes(now)}, of which live {human_bytes(live)}"
        )
    return "\n".join(lines)
