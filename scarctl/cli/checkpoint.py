"""`scarctl checkpoint`: save a part of a state file, and options that saving a state file takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scarctl.cli.given import refuse
from scarctl.cli.output import (
    EXIT_OK,
    EXIT_PARTLY,
    Decorated,
    arena_option,
    common_options,
    emit,
    note,
    now_stored,
    options_for,
    shown_url,
    warn,
)
from scarctl.cli.units import WholeSize
from scarctl.config import DEFAULT_FRACTION, DEFAULT_POLICY, POLICIES, Policy, brief, parse_fraction
from scarctl.util.text import counted, human_bytes

if TYPE_CHECKING:
    from scarctl.ops.checkpoint import Checkpoint, CheckpointSettings

EXAMPLES = """\b
Examples:
  scarctl checkpoint model.safetensors --store ckpt --step 0 --shards 8
  scarctl checkpoint model.safetensors --store ckpt --step 100 --fraction 1/4
  scarctl checkpoint state.pt --store ckpt --step 200 --policy full --json
"""


def state_options(command: Decorated) -> Decorated:
    """Add the options that a new store takes, and `--arena-dir`, which are settings by name; and `--dry-run`."""
    options = (
        click.option("--shards", type=int, metavar="N", help=brief("shards")),
        click.option("--partition-bytes", type=WholeSize(), metavar="SIZE", help=brief("partition_bytes")),
        click.option("--assume-single-writer", is_flag=True, help=brief("assume_single_writer")),
        click.option("--dry-run", is_flag=True, help="Print the result of saving; write nothing."),
        arena_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command(epilog=EXAMPLES)
@click.argument("state", type=click.Path(path_type=Path))
@click.option("--step", type=int, required=True, metavar="N", help="Iterations done when STATE was written.")
@click.option("--fraction", metavar="SHARE", default=str(DEFAULT_FRACTION), help=brief("fraction"))
@click.option(
    "--policy",
    type=click.Choice(POLICIES),
    default=DEFAULT_POLICY,
    show_default=True,
    metavar="NAME",
    help="What is saved: aged (the largest squared change per byte, times its copy's age), priority (the largest "
    "change per byte), round (in turn), random, or full (everything).",
)
@state_options
@common_options
def command(
    state: Path, store: str, step: int, fraction: str | float, policy: Policy, dry_run: bool, **of_states: Any
) -> int:
    """Save the part of the state file STATE that changed most since it was last saved.

    STATE is a .safetensors file, a .pt file with tensors only, or a folder of torch.distributed.checkpoint. The first
    call creates the store, fixes --shards and --partition-bytes, and saves everything. Exit code 3: values are not
    finite; they never replace a good copy.
    """
    if policy == "full":
        refuse("fraction", why="has no effect with --policy full, which saves everything")
    from scarctl.ops.checkpoint import CheckpointSettings

    settings = CheckpointSettings(
        store=store,
        storage_options=options_for(store),
        step=step,
        fraction=parse_fraction(str(fraction)),
        policy=policy,
        **of_states,
    )
    return save_state(state, settings, dry_run=dry_run)


def save_state(state: Path, settings: CheckpointSettings, *, dry_run: bool) -> int:
    """Save a state file, print the result, and return the exit code."""
    from scarctl.formats.state_file import open_state
    from scarctl.ops.checkpoint import checkpoint

    snapshot = settings.snapshot
    done = checkpoint(open_state(state), settings, dry_run=dry_run)
    for reason in done.damaged:
        warn(f"{reason}; its partitions are saved again")
    if done.nonfinite_partitions:
        warn(_about_nonfinite(done))
    emit(done.to_json(), text=_text(done, shown_url(settings.store), dry_run))
    if done.left_out_partitions:
        note(
            f"exit code 3: not everything that was due is saved{', no snapshot is made' if snapshot else ''}"
        )
    return EXIT_PARTLY if done.left_out_partitions else EXIT_OK


def _about_nonfinite(done: Checkpoint) -> str:
    if not done.left_out_partitions:
        return f"{counted(done.nonfinite_partitions, 'partition')} not finite, without a copy before: saved as they are"
    more = "" if done.left_out_partitions <= len(done.left_out) else ", ..."
    names = ", ".join(done.left_out) + more
    return f"{counted(done.left_out_partitions, 'partition')} not finite, the last good copy is kept: {names}"


def _text(done: Checkpoint, store: str, dry_run: bool) -> str:
    share = done.saved_bytes / done.total_bytes if done.total_bytes else 1.0
    verb = "would save" if dry_run else "saved"
    return (
        f"step {done.step}: {verb} {done.saved_partitions} of {counted(done.total_partitions, 'partition')}, "
        f"{human_bytes(done.saved_bytes)} of {human_bytes(done.total_bytes)} ({share:.1%}), to {store}"
        f"{now_stored(done.label)}"
    )
