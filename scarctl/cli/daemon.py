"""`scarctl daemon`: start, inspect and stop the host's daemon, and remove arenas of dead runs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scarctl.cli.given import refuse
from scarctl.cli.output import (
    EXIT_OK,
    arena_option,
    emit,
    error_fields,
    note,
    output_options,
    timeout_option,
    wants_json,
)
from scarctl.errors import ScarError, Unavailable, UsageError
from scarctl.util.text import counted, human_bytes

if TYPE_CHECKING:
    from scarctl.arena.stale import StaleArena
    from scarctl.daemon.status import DaemonStatus, MetricsStatus, ReplicaStatus, RunStatus

EXAMPLES = """\b
Examples:
  scarctl daemon start
  scarctl daemon start --metrics-listen 9464
  scarctl daemon status --json
  scarctl daemon stop --reap
"""
HOLD_SECONDS = 600
_SHARDS_SHOWN = 32
_POLL = 0.05
_PATIENCE = 5.0
"""Seconds that one request to the daemon may take."""


@click.command(epilog=EXAMPLES)
@click.argument("action", type=click.Choice(("start", "status", "stop")))
@click.option(
    "--reap",
    is_flag=True,
    help="With stop: remove arenas of dead runs if the store has all of their content, and those set aside.",
)
@click.option(
    "--metrics",
    metavar="FILE",
    help="With start: file for the figures of all runs, for node_exporter's textfile collector.",
)
@click.option(
    "--metrics-listen",
    metavar="[HOST:]PORT",
    help="With start: serve these figures to Prometheus. Without HOST: to this host only.",
)
@timeout_option("With stop: seconds to wait until the daemon has written its current segment.", default=30.0)
@arena_option
@output_options
def command(
    action: str,
    reap: bool,
    metrics: str | None,
    metrics_listen: str | None,
    timeout: float,
    arena_dir: str | None,
) -> int:
    """Start, inspect or stop this host's daemon, which makes checkpoints durable.

    Sessions start it automatically. It ends when its last run is closed, or is dead and durable. After `start`, it ends
    if no run attaches within ten minutes. `stop` lets it finish its current segment. The rest stays in the arenas, and
    running sessions start another daemon.
    """
    from scarctl.arena.folder import host_folder

    if action != "stop":
        refuse("reap", "timeout", why=f"requires stop, not {action}")
    if action != "start":
        refuse("metrics", "metrics_listen", why=f"requires start, not {action}")
    folder = host_folder(arena_dir)
    if action == "start":
        return _start(folder, metrics, metrics_listen)
    if action == "status":
        return _status(folder)
    return _stop(folder, timeout, reap)


def _start(folder: Path, metrics: str | None, metrics_listen: str | None) -> int:
    from scarctl.daemon.client import hold
    from scarctl.daemon.outlet import FILE_VARIABLE, LISTEN_VARIABLE, parse_listen

    wanted = {}
    if metrics is not None:
        wanted[FILE_VARIABLE] = os.path.abspath(metrics)
    if metrics_listen is not None:
        parse_listen(metrics_listen)
        wanted[LISTEN_VARIABLE] = metrics_listen
    running = _ask(folder) is not None
    pid = hold(folder, HOLD_SECONDS, wanted)
    fields: dict[str, Any] = {"pid": pid, "folder": str(folder), "already_running": running}
    text = f"daemon {pid} {'was' if running else 'is'} running in {folder}"
    if wanted:
        published = _published(folder, pid, wanted.get(FILE_VARIABLE), listen=metrics_listen is not None)
        fields["metrics"] = published
        places = filter(
            None, (published["file"], published["listen"] and f"http://{published['listen']}/metrics")
        )
        text += f"; metrics: {', '.join(places)}"
    emit(fields, text=text)
    return EXIT_OK


def _published(folder: Path, pid: int, file: str | None, *, listen: bool) -> MetricsStatus:
    """Return where the daemon publishes metrics, once it does. Raises UsageError if elsewhere, Unavailable."""
    deadline = time.monotonic() + _PATIENCE
    while (answer := _ask(folder)) is not None:
        published = answer.get("metrics")
        if published is None or file not in (None, published["file"]) or (listen and not published["listen"]):
            raise UsageError(
                f"daemon {pid} was started without these metrics, and cannot add them now",
                hint="stop the daemon while no session runs; set SCARCTL_METRICS... for sessions, which start daemons",
                kind="daemon-running",
            )
        if published["ready"]:
            return published
        if time.monotonic() > deadline or published["fault"] is not None:
            raise Unavailable(
                f"daemon {pid} runs, but cannot publish metrics: {published['fault'] or 'not ready yet'}",
                hint="checkpoints are saved as usual; the daemon keeps trying",
                kind="no-metrics",
            )
        time.sleep(_POLL)
    raise _no_daemon()


def _status(folder: Path) -> int:
    from scarctl.arena.stale import survey

    answer = _ask(folder)
    runs = answer["runs"] if answer else []
    replicas = answer["replicas"] if answer else []
    live = {*(run["id"] for run in runs), *(replica["id"] for replica in replicas)}
    stale = survey(folder, frozenset(live))
    fields: dict[str, Any] = {
        "running": answer is not None,
        "folder": str(folder),
        "pid": answer["pid"] if answer else None,
        "uptime_seconds": round(max(0.0, time.time() - answer["started"]), 3) if answer else None,
        "runs": runs,
        "replicas": replicas,
        "metrics": answer.get("metrics") if answer else None,
        "stale": [arena.to_json() for arena in stale],
    }
    code = EXIT_OK
    if answer is None:
        missing = _no_daemon()
        fields["error"], code = error_fields(missing), missing.exit_code
        if not wants_json():
            note(str(missing))
    lines = [f"daemon {answer['pid']} in {folder}, {counted(len(runs), 'run')}"] if answer else []
    if fields["metrics"] is not None and fields["metrics"]["fault"] is not None:
        lines.append(f"  metrics are not published: {fields['metrics']['fault']}")
    for run in runs:
        lines += _run_lines(run)
    lines += [_replica_line(replica) for replica in replicas]
    lines += [_stale_line(arena) for arena in stale]
    emit(fields, text="\n".join(lines))
    return code


def _stop(folder: Path, timeout: float, reap_too: bool) -> int:
    from scarctl.arena.stale import reap, survey

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
        "reaped": [arena.to_json() for arena in reaped],
        "stale": [arena.to_json() for arena in stale],
    }
    lines = [f"daemon {answer['pid']} has ended" if answer else "no daemon was running"]
    lines += [f"removed {arena.folder}, {human_bytes(arena.bytes)}" for arena in reaped]
    lines += [_stale_line(arena) for arena in stale]
    emit(fields, text="\n".join(lines))
    if attached:
        note(f"{counted(len(attached), 'live session')} will start another daemon")
    return EXIT_OK


def _end(folder: Path, pid: int, timeout: float) -> None:
    """Ask the daemon to end, and wait until it no longer answers. Raises Unavailable after `timeout` seconds."""
    from scarctl.daemon.client import question

    deadline = time.monotonic() + timeout
    question(folder, "stop", patience=_PATIENCE)
    while (answer := _ask(folder)) is not None and answer["pid"] == pid:
        if time.monotonic() > deadline:
            raise Unavailable(
                f"daemon {pid} still writes to a store after {timeout:g} s",
                hint="it ends when that is done; killing it loses no acknowledged checkpoint",
                kind="daemon-busy",
            )
        time.sleep(_POLL)


def _ask(folder: Path) -> DaemonStatus | None:
    """Return the daemon's status, None if no daemon runs. Raises Unavailable if one runs and does not answer."""
    from scarctl.daemon.client import ask_status

    return ask_status(folder, patience=_PATIENCE)


def _no_daemon() -> ScarError:
    return Unavailable(
        "no daemon is running on this host",
        hint="sessions start one automatically; `scarctl daemon start` does, too",
        kind="no-daemon",
    )


def _run_lines(run: RunStatus) -> list[str]:
    from scarctl.daemon.status import kept_copies, part_of
    from scarctl.store.saved import describe

    part = ""
    if run.get("shard") is not None:
        who = part_of(run)
        part = f", {who} (shard {run['shard']})" if who else f", shard {run['shard']}"
    head = f"{run['store']}{part}: process {run['pid']}, {run['phase']}"
    if not run["open"]:
        return [f"{head}, nothing saved yet"]
    lines = [
        f"{head}, step {run['head_step']}, durable {run['durable_step']} (oldest {run['oldest_durable_step']}), "
        f"{describe(run['saved_at'])}, "
        f"queued {human_bytes(run['queued_bytes'])}, {human_bytes(run['bytes_per_second'])}/s, "
        f"{counted(run['errors'], 'error')}"
    ]
    if run["peers"]:
        lines[0] += f", {kept_copies(run)} of {counted(len(run['peers']), 'copy', 'copies')} on other hosts"
    lines += [f"  copy on {peer}" for peer in run["peers"]]
    if run["shards"] is not None and 1 < len(run["shards"]) <= _SHARDS_SHOWN:
        steps = (f"{shard['shard']}: {shard['oldest_durable_step']}" for shard in run["shards"])
        lines.append(f"  oldest durable step by shard: {', '.join(steps)}")
    if run["last_error"] is not None:
        lines.append(f"  {'stopped' if run['stopped'] else 'trying again'}: {run['last_error']}")
    return lines


def _replica_line(replica: ReplicaStatus) -> str:
    step = f"step {replica['head_step']}" if replica["complete"] else "not complete yet"
    return f"keeps a copy for {replica['host']}: {replica['id']}, {step}"


def _stale_line(arena: StaleArena) -> str:
    if arena.owner:
        size = human_bytes(arena.bytes)
        return f"{arena.store or arena.folder}: copy of the memory of {arena.owner}, {size}, step {arena.head_step}"
    if arena.pending_partitions is None:
        what = "cannot be read"
    elif arena.gone is not None:
        what = f"step {arena.head_step}, of a store that is gone: {arena.gone}"
    elif arena.aside:
        what = f"step {arena.head_step}, set aside: it no longer matches the store's state"
    elif arena.foreign:
        what = f"step {arena.head_step}, obsolete: another run has saved to the store or rolled it back"
    elif arena.durable:
        what = f"step {arena.durable_step}, completely in the store"
    else:
        pending = counted(arena.pending_partitions, "partition")
        what = f"step {arena.head_step}, {pending} not in the store: resume that run"
    return f"{arena.store or arena.folder}: left by process {arena.pid}, {human_bytes(arena.bytes)}, {what}"
