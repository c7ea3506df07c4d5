"""`scarctl prune`: delete what need not be kept."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from scarctl.cli.output import EXIT_OK, common_options, emit, human_bytes, note, open_store
from scarctl.errors import UsageError

if TYPE_CHECKING:
    from scarctl.store.prune import Pruned, PrunePlan

EXAMPLES = """\b
Examples:
  scarctl prune --store ckpt --dry-run
  scarctl prune --store ckpt --keep-last 3 --yes
  scarctl prune --store ckpt --keep best --keep 'epoch-*0' --yes --json
  scarctl prune --store ckpt --delete before-warmup --yes
  scarctl prune --store s3://bucket/run --no-writer --yes
"""


@click.command(epilog=EXAMPLES)
@click.option(
    "--keep-last",
    type=int,
    default=1,
    show_default=True,
    metavar="N",
    envvar="SCARCTL_KEEP_LAST",
    help="Sealed states to keep, the newest ones.",
)
@click.option(
    "--keep-every",
    type=int,
    metavar="N",
    envvar="SCARCTL_KEEP_EVERY",
    help="Also keep the first sealed state of every N steps.",
)
@click.option(
    "--keep",
    multiple=True,
    metavar="NAME",
    help="Delete the snapshots that no --keep names (a name or pattern).  [default: keep all]",
)
@click.option("--delete", multiple=True, metavar="NAME", help="Delete this snapshot.")
@click.option(
    "--no-writer",
    is_flag=True,
    help="Nobody writes to this remote store now: collect it. A writer that is alive all the same is fenced.",
)
@click.option("--dry-run", is_flag=True, envvar="SCARCTL_DRY_RUN", help="Show what would go; delete nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@common_options
def command(
    store: str,
    keep_last: int,
    keep_every: int | None,
    keep: tuple[str, ...],
    delete: tuple[str, ...],
    no_writer: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    debug: bool,
) -> int:
    """Delete old copies, records, sealed states and snapshots that need not be kept.

    The newest copy of everything and the newest sealed state stay in any case. A running session keeps its store small
    by itself; beside one only snapshots and left-overs of dead writers are deleted here. Nobody can tell whether there
    is one on a remote store: say --no-writer when a run is over.
    """
    from scarctl.store.prune import Pruned, Retention, plan_prune, prune

    opened = open_store(store)
    retention = Retention(
        keep_last=keep_last, keep_every=keep_every, keep=keep, delete=delete, no_writer=no_writer
    )
    plan = plan_prune(opened, retention)
    if dry_run:
        done = Pruned(len(plan.files), plan.bytes)
    else:
        if not yes and not plan.empty:
            _ask(plan, as_json)
        done = prune(opened, plan)
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
        as_json=as_json,
        text=_text(plan, done, dry_run),
    )
    if plan.writer is not None:
        note(f"{plan.writer}; it collects old copies by itself")
    return EXIT_OK


def _ask(plan: PrunePlan, as_json: bool) -> None:
    if as_json or not sys.stdin.isatty():
        raise UsageError("this deletes files", hint="give --yes, or look first with --dry-run")
    click.echo("\n".join(_lines(plan, "will be")), err=True)
    click.confirm("Delete?", abort=True, err=True)


def _lines(plan: PrunePlan, verb: str) -> list[str]:
    lines = [f"snapshot {s.name}, of step {s.step}, {verb} deleted" for s in plan.delete_snapshots]
    lines += [f"snapshot {s.name}, of step {s.step}, is kept" for s in plan.keep_snapshots]
    gone = f"{'were' if verb == 'was' else verb} given up"
    for word, sets in (("are kept", plan.keep_sealed), (gone, plan.drop_sealed)):
        if sets:
            steps = ", ".join(str(s.step) for s in sets[:20]) + (", ..." if len(sets) > 20 else "")
            lines.append(f"sealed states that {word}: of steps {steps}")
    if plan.retire:
        lines.append(f"shards of earlier ranks that {gone}: {', '.join(map(str, plan.retire))}")
    return lines


def _text(plan: PrunePlan, done: Pruned, dry_run: bool) -> str:
    lines = _lines(plan, "would be" if dry_run else "was")
    if dry_run:
        lines.append(f"would delete {done.files} files, {human_bytes(done.bytes)}; compaction may free more")
    else:
        now, live = done.sizes["bytes"], done.sizes["live_bytes"]
        change = f"{human_bytes(done.bytes)} less" if done.bytes >= 0 else f"{human_bytes(-done.bytes)} more"
        lines.append(
            f"deleted {done.files} files, moved {human_bytes(done.moved_bytes)}: {change}; "
            f"on disk {human_bytes(now)}, of which live {human_bytes(live)}"
        )
    return "\n".join(lines)
