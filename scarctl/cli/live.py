"""`scarctl live`: ask a session that runs on this host to save, or to restore lost parts in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from scarctl.cli.groups import Group
from scarctl.cli.output import (
    EXIT_OK,
    EXIT_PARTLY,
    arena_option,
    emit,
    note,
    now_stored,
    on_store,
    open_store,
    recovery_options,
    shown_url,
    timeout_option,
    warn,
)
from scarctl.cli.recover import cost_lines
from scarctl.state.label import Label
from scarctl.util.text import counted, human_bytes

if TYPE_CHECKING:
    from scarctl.ops.live import LiveCheckpoint, LiveRanks

EXAMPLES = """\b
Examples:
  scarctl live checkpoint --store ckpt
  scarctl live checkpoint --store ckpt --full --timeout 120
  scarctl live recover --store ckpt --lost rank:1
"""


@click.group(cls=Group, epilog=EXAMPLES)
def command() -> None:
    """Ask the session that runs on this host to save, or to restore lost parts in place.

    The session has to save through this host's daemon. It carries out the request after its next step.
    """


@command.command(
    epilog="""\b
Examples:
  scarctl live checkpoint --store ckpt
  scarctl live checkpoint --store ckpt --full --json
""",
)
@click.option("--full", is_flag=True, help="Save the whole state, not only the part that changed most.")
@timeout_option("Seconds to wait until the checkpoint is durable.")
@arena_option
@on_store
def checkpoint(store: str, full: bool, timeout: float, arena_dir: str | None) -> int:
    """Take a checkpoint in the running session.

    The command ends when the checkpoint is durable. If several ranks save to the store, those on this host are asked.
    Exit code 3: with --full, the store does not have the whole state of one step.
    """
    from scarctl.ops.live import checkpoint_live

    made = checkpoint_live(open_store(store), full=full, timeout=timeout, arena_dir=arena_dir)
    return report_saved(made, store, full=full)


def report_saved(
    made: LiveCheckpoint | LiveRanks, url: str, *, full: bool, snapshot: str | None = None
) -> int:
    """Print a running session's checkpoint, and return the exit code. snapshot: name of the snapshot to make."""
    done, whole = made.to_json(), made.label.of_one
    if whole and snapshot is not None:
        done["snapshot"] = snapshot
    who = f"process {done['pid']}"
    if "ranks" in done:
        who = f"{len(done['ranks'])} of {counted(done['world'], 'member' if done['members'] else 'rank')}"
    emit(
        {**done, "live": True, "full": full},
        text=f"step {done['step']}: {who} saved {done['saved_partitions']} of "
        f"{counted(done['total_partitions'], 'partition')}, {human_bytes(done['saved_bytes'])}, "
        f"to {shown_url(url)}{now_stored(made.label)}",
    )
    if not full or whole or (done.get("members") and done["complete"]):
        return EXIT_OK
    missing = ", so no snapshot is made" if snapshot else ""
    why = "values may not be finite"
    if "ranks" in done and len(done["ranks"]) < done["world"]:
        why = "the others have no session on this host"
    elif "ranks" in done and len({line["step"] for line in done["ranks"]}) > 1:
        why = "the ranks did it at different steps; ask again"
    note(f"exit code 3: it saved, but not the whole state of one step{missing}; {why}")
    return EXIT_PARTLY


@command.command(
    epilog="""\b
Examples:
  scarctl live recover --store ckpt --lost 'layers.3.*'
  scarctl live recover --store ckpt --lost rank:1
  scarctl live recover --store ckpt --lost member:2
""",
)
@recovery_options
@timeout_option("Seconds to wait for the session's answer.")
@arena_option
@on_store
def recover(
    store: str, lost: tuple[str, ...], max_rework: float | None, timeout: float, arena_dir: str | None
) -> int:
    """Restore lost parts in the running session.

    They are restored in place, and everything else keeps its progress. If several ranks train together, all of them
    recover after the same step. Members recover alone: name parts of one. Exit code 3: something could only be restored
    from an older copy than the newest one, or not entirely.
    """
    from scarctl.ops.live import recover_live
    from scarctl.theory.rework import Cost, Rework

    done = recover_live(open_store(store), lost, max_rework=max_rework, timeout=timeout, arena_dir=arena_dir)
    report, ranks = done["report"], done["ranks"]
    for reason in report["problems"]:
        warn(reason)
    partitions, nbytes = (sum(rank[i] for rank in ranks) for i in range(2))
    lines = [
        f"restored {counted(partitions, 'partition')}, {human_bytes(nbytes)}, in place, after step {done['step']}"
    ]
    if not report["consistent"]:
        lines.append(str(Label.from_json(report)))
    cost = Cost(Rework(**report["rework"]), report["rollback_steps"], report["reason"])
    lines += cost_lines(cost, report["mode"])
    if len(ranks) > 1:
        lines += [
            f"  rank {r}: {counted(count, 'partition')}, {human_bytes(n)}"
            for r, (count, n) in enumerate(ranks)
            if count
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
    emit(fields, text="\n".join(lines))
    if report["problems"] and not report["degraded"]:
        note("exit code 3: the parts named above could not be restored completely")
    return EXIT_PARTLY if report["degraded"] or report["problems"] else EXIT_OK
