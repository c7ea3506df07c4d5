"""`scarctl recover`: restore what was lost, into a state file, a new file, or a stopped run's arena."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from scarctl.cli.output import (
    EXIT_OK,
    EXIT_PARTLY,
    common_options,
    emit,
    human_bytes,
    note,
    options_for,
    wait_option,
    warn,
)
from scarctl.errors import UsageError
from scarctl.store import Store
from scarctl.store.saved import describe, last_saved

if TYPE_CHECKING:
    from scarctl.prediction import Cost
    from scarctl.repair import Recovery

EXAMPLES = """\b
Examples:
  scarctl recover --store ckpt --lost 2,5 --into survivors.safetensors
  scarctl recover --store ckpt --lost 'layers.3.*' --output lost.safetensors
  scarctl recover --store ckpt --lost rank:2 --output lost.safetensors
  scarctl recover --store ckpt --lost all --mode rollback --output whole.pt
  scarctl recover --store ckpt --lost all --mode rollback --snapshot best --output best.safetensors
  scarctl recover --store ckpt --lost all --dry-run --json
  scarctl recover --store ckpt --lost 2,5 --into survivors.safetensors --mode auto --max-rework 50
  scarctl recover --store ckpt --lost rank:2 --live
"""


@click.command(epilog=EXAMPLES)
@click.option(
    "--lost",
    required=True,
    multiple=True,
    metavar="SPEC",
    help="Shards (2,5) or ranks (rank:1,3), patterns of names ('layers.3.*', 'emb.weight[0:512]'), or all. May be "
    "repeated.",
)
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
    envvar="SCARCTL_MODE",
    help="Only what was lost, or everything to the newest state of one step, or what of the two is predicted to cost "
    "fewer iterations (partial where that cannot be told).",
)
@click.option(
    "--max-rework",
    type=click.FloatRange(min=0),
    metavar="N",
    envvar="SCARCTL_MAX_REWORK",
    help="Refuse, and change nothing, when it may cost more iterations than this, or that cannot be told.",
)
@click.option(
    "--snapshot",
    metavar="NAME",
    help="With --mode rollback: to this snapshot, exactly.",
)
@click.option(
    "--arena-dir", metavar="DIR", envvar="SCARCTL_ARENA_DIR", help="Where arenas are, if not the default."
)
@click.option(
    "--live",
    is_flag=True,
    help="In the session that runs on this host, after its next step.",
)
@wait_option("With --live: how long to wait for its answer.")
@click.option("--dry-run", is_flag=True, envvar="SCARCTL_DRY_RUN", help="Print the plan; change nothing.")
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
    live: bool,
    wait: float,
    dry_run: bool,
    as_json: bool,
    debug: bool,
) -> int:
    """Restore the lost partitions; everything else stays as it is.

    Every copy is verified. Without --into and --output the partitions go into the arena of the stopped run on this
    host. Exit code 3: something could only be restored from an older copy than the newest one.
    """
    if live:
        if into is not None or output is not None or snapshot is not None or dry_run or mode != "partial":
            raise UsageError("--live restores in place what is named as lost: leave the other options out")
        return _live(store, lost, max_rework, wait, arena_dir, as_json)
    from scarctl.repair import RecoverSettings, recover

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


def _live(
    store: str,
    lost: tuple[str, ...],
    max_rework: float | None,
    wait: float,
    arena_dir: str | None,
    as_json: bool,
) -> int:
    from scarctl.cli.recovering import recover_live
    from scarctl.prediction import Cost, Rework

    done = recover_live(
        Store.open(store, storage_options=options_for(store)),
        lost,
        max_rework=max_rework,
        wait=wait,
        arena_dir=arena_dir,
    )
    report, ranks = done["report"], done["ranks"]
    report.setdefault("problems", [])  # of a session of an older version
    for reason in report["problems"]:
        warn(reason)
    partitions, nbytes = (sum(rank[i] for rank in ranks) for i in range(2))
    lines = [f"restored {partitions} partitions, {human_bytes(nbytes)}, in place, after step {done['step']}"]
    cost = Cost(Rework(**report["rework"]), report["rollback_steps"], report["reason"])
    lines += cost_lines(cost, report["mode"])
    if len(ranks) > 1:
        lines += [
            f"  rank {r}: {count} partitions, {human_bytes(n)}" for r, (count, n) in enumerate(ranks) if count
        ]
    fields = {
        **report,
        "live": True,
        "pid": done["pid"],
        "head_step": done["step"],
        "restored_partitions": partitions,
        "lost_partitions": partitions,
        "bytes": nbytes,
        "by_rank": [{"restored_partitions": count, "bytes": n} for count, n in ranks],
    }
    emit(fields, as_json=as_json, text="\n".join(lines))
    if report["problems"] and not report["degraded"]:
        note("exit code 3: what is named above could not be restored whole")
    return EXIT_PARTLY if report["degraded"] or report["problems"] else EXIT_OK


def cost_lines(cost: Cost, mode: str) -> list[str]:
    """What a recovery costs, and why it was made in this way."""
    rework, back = cost.rework, cost.rollback_steps
    if rework.basis == "steps":
        lines = [f"rework: {rework} iterations, which are done again"]
    elif rework.iterations is None:
        lines = [f"predicted rework: cannot tell: {rework.reason}"]
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
        label = f"what was restored is of step {plan.step}; exact only if the survivors are of that step too"
    else:
        label = "what was restored is of several steps: the state is perturbed"
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
        lines.append(f"lost {len(ranks['lost'])} of {ranks['world']} ranks{lost}")
    for shard in fields["shards"]:
        who = (
            f"rank {shard['rank']}, shard {shard['shard']}" if "rank" in shard else f"shard {shard['shard']}"
        )
        age = f", {shard['age']} steps behind the newest" if "age" in shard else ""
        lines.append(
            f"  {who}: {shard['partitions']} partitions, {human_bytes(shard['bytes'])}, "
            f"steps {shard['oldest_step']} to {shard['newest_step']}{age}"
        )
    return "\n".join(lines)
