"""`scarctl daemon`: the host's daemon, and arenas that dead runs left."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scarctl.cli.output import (
    EXIT_OK,
    Seconds,
    arena_option,
    emit,
    error_fields,
    human_bytes,
    note,
    output_options,
)
from scarctl.errors import ScarError, Unavailable, UsageError

if TYPE_CHECKING:
    from scarctl.daemon.stale import StaleArena

EXAMPLES = """\b
Examples:
  scarctl daemon start
  scarctl daemon status --json
  scarctl daemon stop --reap
"""
HOLD_SECONDS = 600
_SHARDS_SHOWN = 32
_POLL = 0.05
_PATIENCE = 5.0
"""Seconds that one question to the daemon may take."""


@click.command(epilog=EXAMPLES)
@click.argument("action", type=click.Choice(("start", "status", "stop")))
@click.option(
    "--reap",
    is_flag=True,
    help="With stop: remove the arenas of dead runs that the store has all of, and those set aside.",
)
@click.option(
    "--timeout",
    type=Seconds(),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    envvar="SCARCTL_TIMEOUT",
    help="With stop: how long to wait for what is being written.",
)
@arena_option
@output_options
def command(
    action: str, reap: bool, timeout: float, arena_dir: str | None, as_json: bool, debug: bool
) -> int:
    """Start, look at or stop the process of this host that makes checkpoints durable.

    Sessions start it by themselves. It ends when its last run is closed, or dead and durable; after `start`, when no
    run comes within ten minutes. `stop` lets it finish what it is writing; what waits stays in the arenas, and
    sessions that are alive start another daemon.
    """
    from scarctl.daemon.folder import host_folder

    context = click.get_current_context()
    for name in ("reap", "timeout"):
        given = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if given and action != "stop":
            raise UsageError(f"--{name} goes with stop, not with {action}")
    folder = host_folder(arena_dir)
    if action == "start":
        return _start(folder, as_json)
    if action == "status":
        return _status(folder, as_json)
    return _stop(folder, timeout, reap, as_json)


def _start(folder: Path, as_json: bool) -> int:
    from scarctl.daemon.client import hold

    running = _ask(folder) is not None
    pid = hold(folder, HOLD_SECONDS)
    fields = {"pid": pid, "folder": str(folder), "already_running": running}
    emit(fields, as_json=as_json, text=f"daemon {pid} {'was' if running else 'is'} running in {folder}")
    return EXIT_OK


def _status(folder: Path, as_json: bool) -> int:
    from scarctl.daemon.stale import survey

    answer = _ask(folder)
    runs: list[dict[str, Any]] = answer["runs"] if answer else []
    stale = survey(folder, frozenset(run["id"] for run in runs))
    fields: dict[str, Any] = {
        "running": answer is not None,
        "folder": str(folder),
        "pid": answer["pid"] if answer else None,
        "uptime_seconds": round(max(0.0, time.time() - answer["started"]), 3) if answer else None,
        "runs": runs,
        "stale": [_stale_fields(arena) for arena in stale],
    }
    code = EXIT_OK
    if answer is None:
        missing = _no_daemon()
        fields["error"], code = error_fields(missing), missing.exit_code
        if not as_json:
            note(str(missing))
    lines = [f"daemon {answer['pid']} in {folder}, {len(runs)} runs"] if answer else []
    for run in runs:
        lines += _run_lines(run)
    lines += [_stale_line(arena) for arena in stale]
    emit(fields, as_json=as_json, text="\n".join(lines))
    return code


def _stop(folder: Path, timeout: float, reap_too: bool, as_json: bool) -> int:
    from scarctl.daemon.stale import reap, survey

    answer = _ask(folder)
    if answer is not None:
        _end(folder, answer["pid"], timeout)
    elif not reap_too:
        raise _no_daemon()
    reaped = reap(folder) if reap_too else []
    attached = [run for run in answer["runs"] if run["phase"] == "attached"] if answer else []
    stale = survey(folder, frozenset(run["id"] for run in attached))
    fields = {
        "pid": answer["pid"] if answer else None,
        "live_runs": len(attached),
        "reaped": [_stale_fields(arena) for arena in reaped],
        "stale": [_stale_fields(arena) for arena in stale],
    }
    lines = [f"daemon {answer['pid']} has ended" if answer else "no daemon was running"]
    lines += [f"removed {arena.folder}, {human_bytes(arena.nbytes)}" for arena in reaped]
    lines += [_stale_line(arena) for arena in stale]
    emit(fields, as_json=as_json, text="\n".join(lines))
    if attached:
        note(f"{len(attached)} sessions are alive: they start another daemon")
    return EXIT_OK


def _end(folder: Path, pid: int, timeout: float) -> None:
    """Ask the daemon to end, and wait until nobody answers, or another one. Raises Unavailable after `timeout`."""
    deadline = time.monotonic() + timeout
    _ask(folder, "stop")
    while (answer := _ask(folder)) is not None and answer["pid"] == pid:
        if time.monotonic() > deadline:
            raise Unavailable(
                f"daemon {pid} still writes to a store after {timeout:g} s",
                hint="it ends when that is done; nothing that was acknowledged is lost if it is killed",
                kind="daemon-busy",
            )
        time.sleep(_POLL)


def _ask(folder: Path, op: str = "status") -> dict[str, Any] | None:
    """The daemon's answer, None when there is no daemon. Raises Unavailable when there is one that does not answer."""
    from scarctl.daemon.client import question

    return question(folder, op, patience=_PATIENCE)


def _no_daemon() -> ScarError:
    return Unavailable(
        "no daemon is running on this host",
        hint="sessions start one by themselves; so does `scarctl daemon start`",
        kind="no-daemon",
    )


def _run_lines(run: dict[str, Any]) -> list[str]:
    from scarctl.store.saved import describe

    part = ""
    if run.get("shard") is not None:
        part = (
            f", shard {run['shard']}"
            if run.get("rank") is None
            else f", rank {run['rank']} (shard {run['shard']})"
        )
    head = f"{run['store']}{part}: process {run['pid']}, {run['phase']}"
    if not run["open"]:
        return [f"{head}, nothing saved yet"]
    lines = [
        f"{head}, step {run['head_step']}, durable {run['durable_step']} (oldest {run['oldest_durable_step']}), "
        f"{describe(run['saved_at'])}, "
        f"queued {human_bytes(run['queued_bytes'])}, {human_bytes(run['bytes_per_second'])}/s, "
        f"{run['errors']} errors, {len(run['peers'])} peers"
    ]
    if run["shards"] is not None and 1 < len(run["shards"]) <= _SHARDS_SHOWN:
        steps = (f"{shard['shard']}: {shard['oldest_durable_step']}" for shard in run["shards"])
        lines.append(f"  oldest durable step by shard: {', '.join(steps)}")
    if run["last_error"] is not None:
        lines.append(f"  {'stopped' if run['stopped'] else 'trying again'}: {run['last_error']}")
    return lines


def _stale_fields(arena: StaleArena) -> dict[str, Any]:
    return {
        "id": arena.id,
        "store": arena.place or None,
        "folder": str(arena.folder),
        "bytes": arena.nbytes,
        "idle_seconds": round(arena.seconds, 3),
        "pid": arena.pid,
        "head_step": arena.head_step,
        "durable_step": arena.durable_step,
        "pending_partitions": arena.pending if arena.pending >= 0 else None,
        "handovers": arena.handovers,
        "durable": arena.durable,
        "foreign": arena.foreign,
        "aside": arena.aside,
    }


def _stale_line(arena: StaleArena) -> str:
    if arena.pending < 0:
        what = "cannot be read"
    elif arena.aside:
        what = f"step {arena.head_step}, set aside: it is not of the store's state any more"
    elif arena.foreign:
        what = (
            f"step {arena.head_step}, the store was saved to or rolled back from elsewhere: of no use to it"
        )
    elif arena.durable:
        what = f"step {arena.durable_step}, the store has all of it"
    else:
        what = f"step {arena.head_step}, {arena.pending} partitions are not in the store: resume that run"
    return f"left by process {arena.pid}: {arena.folder}, {human_bytes(arena.nbytes)}, {what}"
