"""Define `scarctl recover`: restore lost partitions into a state file, a new file, or a stopped run's arena."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scarctl.cli.output import (
    EXIT_OK,
    EXIT_PARTLY,
    arena_option,
    emit,
    in_iterations,
    note,
    on_store,
    options_for,
    recovery_options,
    warn,
)
from scarctl.cli.progress import Progress
from scarctl.store import Store
from scarctl.store.saved import describe, last_saved
from scarctl.util.text import counted, human_bytes

if TYPE_CHECKING:
    from scarctl.ops.recover import Recovery
    from scarctl.theory.rework import Cost

EXAMPLES = """\b
Examples:
  scarctl recover --store ckpt --lost 2,5 --into survivors.safetensors
  scarctl recover --store ckpt --lost 'layers.3.*' --output lost.safetensors
  scarctl recover --store ckpt --lost all --mode rollback --output whole.pt
  scarctl recover --store ckpt --lost rank:2 --dry-run --json
"""


@click.command(epilog=EXAMPLES)
@recovery_options
@click.option(
    "--into",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="State file whose lost rows are patched, atomically.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="New file for the rows: .safetensors, .pt or .pth.",
)
@click.option(
    "--mode",
    type=click.Choice(["partial", "rollback", "auto"]),
    metavar="NAME",
    default="partial",
    show_default=True,
    help="partial: restore what is lost; rollback: everything, to the newest state of one step; auto: whichever is "
    "predicted to cost less.",
)
@click.option(
    "--snapshot", metavar="NAME", help="With --mode rollback: to this snapshot, and no other state."
)
@arena_option
@click.option("--dry-run", is_flag=True, help="Print the plan; change nothing.")
@on_store
def command(store: str, dry_run: bool, **options: Any) -> int:
    """Restore the lost partitions; everything else stays as it is.

    Every copy is verified. Without --into and --output the partitions go into the arena of the stopped run on this
    host. Exit code 3: something could only be restored from an older copy than the newest one.
    """
    from scarctl.ops.recover import RecoverSettings, recover

    settings = RecoverSettings(store=store, storage_options=options_for(store), **options)
    saved_at = last_saved(Store.open(store, storage_options=settings.storage_options))
    done = recover(settings, dry_run=dry_run, progress=Progress("restored"))
    for reason in done.problems:
        warn(reason)
    if done.left_out:
        warn(
            f"{settings.into} holds no optimizer slots: {counted(len(done.left_out), 'tensor')} left out, "
            f"such as {min(done.left_out)!r}"
        )
    emit(
        {**done.to_json(), "saved_at": saved_at, "dry_run": dry_run},
        text=f"{_text(done, dry_run, new_file=settings.output is not None)}\nthe store was {describe(saved_at)}",
    )
    if done.plan.degraded:
        note("exit code 3: the newest copy of something is damaged, an older one was taken")
    return EXIT_PARTLY if done.plan.degraded else EXIT_OK


def cost_lines(cost: Cost, mode: str) -> list[str]:
    """Return lines about the cost of a recovery, and the reason for its mode."""
    rework, back = cost.rework, cost.rollback_steps
    if rework.basis == "steps":
        lines = [f"rework: {in_iterations(rework)}, to be done again"]
    elif rework.iterations is None:
        lines = [f"predicted rework: unknown: {rework.reason}"]
    else:
        lines = [f"predicted rework: {in_iterations(rework)}, by {rework.basis}"]
    if mode == "partial" and back is not None:
        lines[0] += f"; a rollback would cost {back}"
    if cost.reason is not None:
        lines.append(f"mode {mode}: {cost.reason}")
    return lines


def _text(done: Recovery, dry_run: bool, *, new_file: bool) -> str:
    plan, fields = done.plan, done.plan.to_json()
    tiers = ", ".join(f"{count} from {tier}" for tier, count in fields["tiers"].items()) or "none"
    lines = [
        f"{'would restore' if dry_run else 'restored'} {counted(fields['restored_partitions'], 'partition')} "
        f"({tiers}), "
        f"{human_bytes(plan.nbytes)}, to {done.output or 'the arena'}",
        str(plan.label),
    ]
    value, kind = done.perturbation.value, done.perturbation.kind
    if value is not None:
        lines.append(f"perturbation: {value:.6g} ({kind})")
    elif not new_file:
        lines.append("perturbation: unknown, because the lost values are gone")
    lines += cost_lines(done.cost, plan.mode)
    ranks = fields.get("ranks")
    if ranks is not None and plan.mode == "partial":
        lost = f" ({', '.join(map(str, ranks['lost']))})" if ranks["lost"] else ""
        lines.append(f"lost {len(ranks['lost'])} of {counted(ranks['world'], plan.noun)}{lost}")
    for shard in fields["shards"]:
        who = (
            f"{plan.noun} {shard['rank']}, shard {shard['shard']}"
            if "rank" in shard
            else f"shard {shard['shard']}"
        )
        age = f", {counted(shard['age'], 'step')} behind the newest" if "age" in shard else ""
        lines.append(
            f"  {who}: {counted(shard['partitions'], 'partition')}, {human_bytes(shard['bytes'])}, "
            f"steps {shard['oldest_step']} to {shard['newest_step']}{age}"
        )
    return "\n".join(lines)
