"""`scarctl checkpoint`: one partial checkpoint of a state file, or of a running session."""

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
    open_store,
    options_for,
    shown_url,
    wait_option,
    warn,
)
from scarctl.config import DEFAULT_FRACTION, DEFAULT_POLICY, POLICIES, parse_fraction
from scarctl.errors import UsageError

if TYPE_CHECKING:
    from scarctl.oneshot import Checkpoint

EXAMPLES = """\b
Examples:
  scarctl checkpoint model.safetensors --store ckpt --step 0 --shards 8
  scarctl checkpoint model.safetensors --store ckpt --step 100 --fraction 1/4
  scarctl checkpoint state.pt --store ckpt --step 200 --policy full --json
  scarctl checkpoint model.safetensors --store ckpt --step 300 --snapshot best
  scarctl checkpoint --live --full --store ckpt
"""
_LIVE = ("full", "wait")
_FILE = (
    "state",
    "step",
    "fraction",
    "policy",
    "shards",
    "partition_bytes",
    "assume_single_writer",
    "dry_run",
)


@click.command(epilog=EXAMPLES)
@click.argument("state", type=click.Path(path_type=Path), required=False)
@click.option("--step", type=int, envvar="SCARCTL_STEP", help="Iterations done when STATE was written.")
@click.option(
    "--fraction",
    default=str(DEFAULT_FRACTION),
    show_default="1/8",
    envvar="SCARCTL_FRACTION",
    help="Share of the state's bytes to write at most: 0.125 or 1/8.",
)
@click.option(
    "--policy",
    type=click.Choice(POLICIES),
    default=DEFAULT_POLICY,
    show_default=True,
    envvar="SCARCTL_POLICY",
    help="What to save: what changed most, in turn, at random, or all.",
)
@click.option(
    "--shards",
    type=int,
    envvar="SCARCTL_SHARDS",
    help="Parts that fail together; fixed by the first checkpoint.  [default: 1]",
)
@click.option(
    "--partition-bytes",
    type=int,
    envvar="SCARCTL_PARTITION_BYTES",
    help="Size of a partition; fixed by the first checkpoint.  [default: from the state's size]",
)
@click.option(
    "--assume-single-writer",
    is_flag=True,
    envvar="SCARCTL_ASSUME_SINGLE_WRITER",
    help="Make the store also where nothing can be created exclusively.",
)
@click.option(
    "--dry-run", is_flag=True, envvar="SCARCTL_DRY_RUN", help="Say what would be saved; write nothing."
)
@click.option("--live", is_flag=True, help="Ask the session that runs on this host to save now.")
@click.option("--full", is_flag=True, help="With --live: the whole state.")
@click.option(
    "--snapshot",
    metavar="NAME",
    help="Save the whole state, and keep it under this name.",
)
@wait_option("With --live: how long to wait until it is durable.")
@arena_option
@common_options
def command(
    state: Path | None,
    store: str,
    step: int | None,
    fraction: str | float,
    policy: str,
    shards: int | None,
    partition_bytes: int | None,
    assume_single_writer: bool,
    arena_dir: str | None,
    dry_run: bool,
    live: bool,
    full: bool,
    snapshot: str | None,
    wait: float,
    as_json: bool,
    debug: bool,
) -> int:
    """Save the part of the state file STATE that changed most since it was last saved.

    STATE is a .safetensors file, a .pt file with tensors only, or a folder of torch.distributed.checkpoint. The
    first call creates the store and saves everything. Values that are not finite never replace a good copy: then the
    exit code is 3.

    With --live there is no STATE: the session that saves to the store through this host's daemon takes a checkpoint
    after its next step. Exit code 0 when that is durable.
    """
    _refuse(*(_FILE if live else _LIVE), why="cannot be combined with --live" if live else "goes with --live")
    if live:
        return _live(store, full or snapshot is not None, wait, arena_dir, as_json, snapshot)
    if state is None or step is None:
        raise UsageError(
            "give STATE and --step, or --live", hint="`scarctl checkpoint --help` shows examples"
        )
    from scarctl.oneshot import CheckpointSettings, checkpoint
    from scarctl.statefile import open_state

    settings = CheckpointSettings(
        store=store,
        storage_options=options_for(store),
        assume_single_writer=assume_single_writer,
        step=step,
        fraction=parse_fraction(str(fraction)),
        policy=policy,
        shards=shards,
        partition_bytes=partition_bytes,
        arena_dir=arena_dir,
        snapshot=snapshot,
    )
    done = checkpoint(open_state(state), settings, dry_run=dry_run)
    for reason in done.damaged:
        warn(f"{reason}; what it held is saved again")
    if done.nonfinite_partitions:
        warn(_about_nonfinite(done))
    emit(
        {**done.to_json(), "policy": policy if snapshot is None else "full", "dry_run": dry_run},
        as_json=as_json,
        text=_text(done, shown_url(store), dry_run),
    )
    if done.left_out_partitions:
        note(
            f"exit code 3: not everything that was due is saved{', no snapshot is made' if snapshot else ''}"
        )
    return EXIT_PARTLY if done.left_out_partitions else EXIT_OK


def _refuse(*names: str, why: str) -> None:
    """Raise UsageError for those given on the command line."""
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            shown = "STATE" if name == "state" else f"--{name.replace('_', '-')}"
            raise UsageError(f"{shown} {why}")


def _live(
    url: str, full: bool, wait: float, arena_dir: str | None, as_json: bool, snapshot: str | None
) -> int:
    from scarctl.cli.live import checkpoint_live, snapshot_live
    from scarctl.store.snapshot import check_new_snapshot

    store = open_store(url)
    if snapshot is None:
        made = checkpoint_live(store, full=full, wait=wait, arena_dir=arena_dir)
    else:
        check_new_snapshot(store, snapshot)
        made = snapshot_live(store, snapshot, wait=wait, arena_dir=arena_dir)
    done = made.to_json()
    if made.exact and snapshot is not None:
        done["snapshot"] = snapshot
    exact = "; the whole state is of this step" if done["exact"] else ""
    who = f"process {done['pid']}"
    if "ranks" in done:
        who = f"{len(done['ranks'])} of {done['world']} ranks"
    emit(
        {**done, "live": True, "full": full},
        as_json=as_json,
        text=f"step {done['step']}: {who} saved {done['saved_partitions']} of "
        f"{done['total_partitions']} partitions, {human_bytes(done['saved_bytes'])}, to {shown_url(url)}{exact}",
    )
    if full and not done["exact"]:
        missing = ", so no snapshot is made" if snapshot else ""
        why = "values may not be finite"
        if "ranks" in done and len(done["ranks"]) < done["world"]:
            why = "the other ranks have no session on this host"
        elif "ranks" in done and len({line["step"] for line in done["ranks"]}) > 1:
            why = "the ranks did it at different steps; ask again"
        note(f"exit code 3: it saved, but not the whole state of one step{missing}; {why}")
        return EXIT_PARTLY
    return EXIT_OK


def _about_nonfinite(done: Checkpoint) -> str:
    if not done.left_out_partitions:
        return f"{done.nonfinite_partitions} partitions are not finite; they had no copy before, so they are saved"
    more = "" if done.left_out_partitions <= len(done.left_out) else ", ..."
    names = ", ".join(done.left_out) + more
    return f"{done.left_out_partitions} partitions are not finite, their last good copy is kept: {names}"


def _text(done: Checkpoint, store: str, dry_run: bool) -> str:
    share = done.saved_bytes / done.total_bytes if done.total_bytes else 1.0
    verb = "would save" if dry_run else "saved"
    exact = "; the whole state is of this step" if done.exact else ""
    return (
        f"step {done.step}: {verb} {done.saved_partitions} of {done.total_partitions} partitions, "
        f"{human_bytes(done.saved_bytes)} of {human_bytes(done.total_bytes)} ({share:.1%}), to {store}{exact}"
    )
