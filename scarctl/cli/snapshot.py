"""`scarctl snapshot`: whole states of one step, kept under a name until they are deleted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from scarctl.cli.checkpoint import save_state, state_options
from scarctl.cli.given import refuse
from scarctl.cli.groups import Group
from scarctl.cli.live import report_saved
from scarctl.cli.output import (
    EXIT_OK,
    common_options,
    emit,
    on_store,
    open_store,
    options_for,
    timeout_option,
)
from scarctl.cli.prune import delete_old, deleting_options
from scarctl.errors import UsageError

EXAMPLES = """\b
Examples:
  scarctl snapshot create best --store ckpt
  scarctl snapshot create best model.safetensors --store ckpt --step 300
  scarctl snapshot list --store ckpt
  scarctl snapshot delete best --store ckpt --yes
"""
_OF_STATES = ("step", "shards", "partition_bytes", "assume_single_writer", "dry_run")


@click.group(cls=Group, epilog=EXAMPLES)
def command() -> None:
    """Create, list and delete snapshots: whole states of one step, kept under a name.

    `scarctl recover --mode rollback --snapshot NAME` and `scarctl export --snapshot NAME` read them.
    """


@command.command(
    "list",
    epilog="""\b
Examples:
  scarctl snapshot list --store ckpt
  scarctl snapshot list --store ckpt --json
""",
)
@on_store
def list_(store: str) -> int:
    """List a store's snapshots, oldest step first."""
    from scarctl.store import snapshots

    found = sorted(snapshots(open_store(store)), key=lambda one: (one.step, one.name))
    emit(
        {"snapshots": [one.to_json() for one in found]},
        text="\n".join(f"{one.name}: step {one.step}" for one in found) or "no snapshots",
    )
    return EXIT_OK


@command.command(
    epilog="""\b
Examples:
  scarctl snapshot create best --store ckpt
  scarctl snapshot create best model.safetensors --store ckpt --step 300
""",
)
@click.argument("name")
@click.argument("state", type=click.Path(path_type=Path), required=False)
@click.option("--step", type=int, help="Iterations done when STATE was written.")
@state_options
@timeout_option("Without STATE: seconds to wait until the snapshot is durable.")
@common_options
def create(
    name: str,
    state: Path | None,
    store: str,
    step: int | None,
    dry_run: bool,
    timeout: float,
    **of_states: Any,
) -> int:
    """Save a whole state, and keep it as the snapshot NAME.

    Without STATE, the session that runs on this host saves its state after its next step; all of its ranks have to run
    on this host. With STATE, a state file is saved (see `scarctl checkpoint`). Exit code 3: values are not finite, and
    there is no snapshot.
    """
    if state is None:
        refuse(*_OF_STATES, why="requires STATE")
        return _of_session(name, store, timeout, of_states["arena_dir"])
    refuse("timeout", why="cannot be combined with STATE")
    if step is None:
        raise UsageError(
            "give --step with STATE", hint="it is the number of iterations done when STATE was written"
        )
    from scarctl.ops.checkpoint import CheckpointSettings

    settings = CheckpointSettings(
        store=store, storage_options=options_for(store), step=step, snapshot=name, **of_states
    )
    return save_state(state, settings, dry_run=dry_run)


def _of_session(name: str, store: str, timeout: float, arena_dir: str | None) -> int:
    from scarctl.ops.live import snapshot_live

    made = snapshot_live(open_store(store), name, timeout=timeout, arena_dir=arena_dir)
    return report_saved(made, store, full=True, snapshot=name)


@command.command(
    epilog="""\b
Examples:
  scarctl snapshot delete best --store ckpt --dry-run
  scarctl snapshot delete epoch-1 epoch-2 --store ckpt --yes --json
""",
)
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@deleting_options
@common_options
def delete(
    names: tuple[str, ...], store: str, keep_last: int, keep_every: int | None, dry_run: bool, yes: bool
) -> int:
    """Delete snapshots permanently, and free their space.

    This deletes old copies and sealed states too, as `scarctl prune` does. A session that writes to the store frees the
    space automatically, later.
    """
    from scarctl.store.prune import Retention

    retention = Retention(keep_last=keep_last, keep_every=keep_every, delete=names)
    return delete_old(store, retention, dry_run=dry_run, yes=yes)
