"""Define `scarctl recover`: restore lost partitions into a state file, a new file, or a stopped run's arena."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from scarctl.cli.output import (
    EXIT_OK,
    EXIT_PARTLY,
    arena_option,
    common_options,
    emit,
    human_bytes,
    note,
    options_for,
    recovery_options,
    warn,
)
from scarctl.store import Store
from scarctl.store.saved import describe, last_saved

if TYPE_CHECKING:
    from scarctl.ops.recover import Recovery
    from scarctl.theory.rework import Cost

EXAMPLES = """\b
Examples:
  scarctl recover --store ckpt --lost 2,5 --into survivors.safetensors
  scarctl recover --store ckpt --lost 'layers.3.*' --output lost.safetensors
  scarctl recover --store ckpt --lost rank:2 --output lost.safetensors
  scarctl recover --store ckpt --lost all --mode rollback --output whole.pt
  scarctl recover --store ckpt --lost all --mode rollback --snapshot best --output best.safetensors
  scarctl recover --store ckpt --lost all --dry-run --json
  scarctl recover --store ckpt --lost 2,5 --into survivors.safetensors --mode auto --max-rework 50
"""


@click.command(epilog=EXAMPLES)
@recovery_options
@click.option(
    "--into",
    type=click.Path(path_type=Path),
    help="State file (.safetensors, .pt) whose lost rows are patched, atomically.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="New file for the restored rows: .pt, .pth or else safetensors.",
)
@click.option(
    "--mode",
    type=click.Choice(["partial", "rollback", "auto"]),
    default="partial",
    show_default=True,
    help="Restore only lost partitions, or everything to the newest state of one step. auto: the one that is predicted "
    "to cost fewer iterations, partial if there is no prediction.",
)
@click.option(
    "--snapshot",
    metavar="NAME",
    help="With --mode rollback: to this snapshot, exactly.",
)
@arena_option
@click.option("--dry-run", is_flag=True, help="Print the plan; change nothing.")
@common_options
def command(
    store: str,
    lost: tuple[str, ...],
    into: Path | None,
    output: Path | None,
    mode: str,
    max_rework: float | None,
    snapshot: str | None,
    arena_dir: str | None,
    dry_run: bool,
    as_json: bool,
    debug: bool,
) -> int:
    """Restore the lost partitions; everything else stays as it is.

    Every copy is verified. Without --into and --output the partitions go into the arena of the stopped run on this
    host. Exit code 3: something could only be restored from an older copy than the newest one.
    """
    from scarctl.ops.recover import RecoverSettings, recover

    settings = RecoverSettings(
        store=store,
        storage_options=options_for(store),
        lost=lost,
        mode=mode,
        into=into,
        output=output,
        arena_dir=arena_dir,
        snapshot=snapshot,
        max_rework=max_rework,
    )
    saved_at = last_saved(Store.open(store, storage_options=settings.storage_options))
    done = recover(settings, dry_run=dry_run)
    for reason in done.problems:
        warn(reason)
    if done.left_out:
        warn(
            f"{into} holds no optimizer slots: {len(done.left_out)} tensors such as {min(done.left_out)!r} are left out"
        )
    emit(
        {**done.to_json(), "saved_at": saved_at, "dry_run": dry_run},
        as_json=as_json,
        text=f"{_text(done, dry_run, new_file=output is not None)}\nthe store was {describe(saved_at)}",
    )
    if done.plan.degraded:
        note("exit code 3: the newest copy of something is damaged, an older one was taken")
    return EXIT_PARTLY if done.plan.degraded else EXIT_OK


def cost_lines(cost: Cost, mode: str) -> list[str]:
    """Return lines about the cost of a recovery, and the reason for its mode."""
    rework, back = cost.rework, cost.rollback_steps
    if rework.basis == "steps":
        lines = [f"rework: {rework} iterations, which are done again"]
    elif rework.iterations is None:
        lines = [f"predicted rework: unknown: {rework.reason}"]
    else:
        lines = [f"predicted rework: {rework} iterations, by {rework.basis}"]
    if mode == "partial" and back is not None:
        lines[0] += f"; a rollback would cost {back}"
    if cost.reason is not None:
        lines.append(f"mode {mode}: {cost.reason}")
    return lines


def _text(done: Recovery, dry_run: bool, *, new_file: bool) -> str:
    plan, fields = done.plan, done.plan.to_json()
    tiers = ", ".join(f"{count} from {tier}" for tier, count in fields["tiers"].items()) or "none"
    if plan.exact:
        label = f"the state is exact, of step {plan.step}"
    elif plan.step is not None:
        label = f"restored copies are of step {plan.step}; the state is exact only if the survivors are, too"
    else:
        label = "restored copies are of several steps: the state is perturbed"
    lines = [
        f"{'would restore' if dry_run else 'restored'} {fields['restored_partitions']} partitions ({tiers}), "
        f"{human_bytes(plan.nbytes)}, to {done.output or 'the arena'}",
        label,
    ]
    value, kind = done.perturbation.value, done.perturbation.kind
    if value is not None:
        lines.append(f"perturbation: {value:.6g} ({kind})")
    elif not new_file:
        lines.append("perturbation: unknown, for the lost values are gone")
    lines += cost_lines(done.cost, plan.mode)
    ranks = fields.get("ranks")
    if ranks is not None and plan.mode == "partial":
        lost = f" ({', '.join(map(str, ranks['lost']))})" if ranks["lost"] else ""
        lines.append(f"lost {len(ranks['lost'])} of {ranks['world']} {plan.noun}s{lost}")
    for shard in fields["shards"]:
        who = (
            f"{plan.noun} {shard['rank']}, shard {shard['shard']}"
            if "rank" in shard
            else f"shard {shard['shard']}"
        )
        age = f", {shard['age']} steps behind the newest" if "age" in shard else ""
        lines.append(
            f"  {who}: {shard['partitions']} partitions, {human_bytes(shard['bytes'])}, "
            f"steps {shard['oldest_step']} to {shard['newest_step']}{age}"
        )
    return "\n".join(lines)
