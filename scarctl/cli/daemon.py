"""`scarctl daemon`: start, inspect and stop the host's daemon, and remove arenas of dead runs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from scarctl.cli.given import chosen_store, refuse
from scarctl.cli.output import (
    EXIT_OK,
    arena_option,
    emit,
    error_fields,
    note,
    output_options,
    store_option,
    timeout_option,
    wants_json,
)
from scarctl.errors import Contention, ScarError, Unavailable, UsageError
from scarctl.util.text import counted, human_bytes

if TYPE_CHECKING:
    from scarctl.arena.stale import StaleArena
    from scarctl.daemon.status import DaemonStatus, MetricsStatus, ReplicaStatus, RunStatus

EXAMPLES = """\b
Examples:
  scarctl daemon start
  scarctl daemon start --metrics-listen 9464
  scarctl daemon status --json
  scarctl daemon stop --store ckpt
  scarctl daemon stop --all --reap
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
@store_option(about="With stop: end saving for the dead runs of this store alone, of all ranks.")
@click.option(
    "--all", "everything", is_flag=True, help="With stop: end the daemon, and so saving for all runs."
)
@click.option("--dry-run", is_flag=True, help="With stop: only print what would be ended and removed.")
@timeout_option("With stop: seconds to wait until the daemon has written its current segment.", default=30.0)
@arena_option
@output_options
def command(
    action: str,
    reap: bool,
    metrics: str | None,
    metrics_listen: str | None,
    store: str | None,
    everything: bool,
    dry_run: bool,
    timeout: float,
    arena_dir: str | None,
) -> int:
    """Start, inspect or stop this host's daemon, which makes checkpoints durable.

    Sessions start it automatically. It ends when its last run is closed, or is dead and durable. After `start`, it ends
    if no run attaches within ten minutes. `stop` lets it finish its current segment. The rest stays in the arenas.

    `stop --all` ends the daemon; running sessions start another one. `stop --store URL` ends saving for the runs of
    one store whose process is dead. The daemon and all other runs go on. A run whose training is alive is refused,
    because its session would begin again: stop the training instead.
    """
    from scarctl.arena.folder import host_folder
    from scarctl.ops.known import place_of, unchosen

    if action != "stop":
        refuse("reap", "timeout", "store", "everything", "dry_run", why=f"requires stop, not {action}")
    if action != "start":
        refuse("metrics", "metrics_listen", why=f"requires start, not {action}")
    folder = host_folder(arena_dir)
    if action == "start":
        return _start(folder, metrics, metrics_listen)
    if action == "status":
        return _status(folder)
    place = place_of(chosen_store(store, everything=everything))
    if store is None and not everything:
        raise unchosen("daemon stop", (_ask(folder) or {"runs": []})["runs"])
    return _stop(folder, timeout, place, reap_too=reap, dry_run=dry_run)


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


def _stop(folder: Path, timeout: float, place: str | None, *, reap_too: bool, dry_run: bool) -> int:
    from scarctl.arena.stale import reap, survey
    from scarctl.daemon.client import ask, question
    from scarctl.ops.known import described, runs_at

    answer = _ask(folder)
    runs = runs_at(answer, place)
    if answer is None and not reap_too:
        raise _no_daemon()
    if place is not None and not runs and not reap_too:
        raise UsageError(
            "the daemon saves nothing to this store",
            hint="`scarctl daemon status` shows the runs",
            kind="no-session",
        )
    alive = [run for run in runs if run["phase"] == "attached"]
    if place is not None and alive:
        raise Contention(
            f"{described(alive[0])}: it would begin to save again", hint="stop the training instead"
        )
    if answer is not None and not dry_run:
        for run in runs:
            note(f"ending saving for {described(run)}")
        if place is None:
            question(folder, "stop", patience=_PATIENCE)
        for run in runs if place is not None else ():
            ask(folder, "release", patience=_PATIENCE, run=run["id"])
        _await_end(folder, answer["pid"], None if place is None else {run["id"] for run in runs}, timeout)
    kept = frozenset(run["id"] for run in runs_at(answer, None) if run in alive or run not in runs)
    reaped = reap(folder, place=place, live=kept) if reap_too and not dry_run else []
    stale = survey(folder, kept, place=place)
    if dry_run and reap_too:
        reaped = [arena for arena in stale if arena.removable]
        stale = [arena for arena in stale if not arena.removable]
    pid = answer["pid"] if answer else None
    fields = {
        "pid": pid,
        "dry_run": dry_run,
        "runs": runs,
        "live_runs": len(alive),
        "reaped": [arena.to_json() for arena in reaped],
        "stale": [arena.to_json() for arena in stale],
    }
    would = "would be " if dry_run else ""
    lines = [f"saving {would or 'has '}ended: {described(run)}" for run in runs]
    if place is None:
        lines.append(f"daemon {pid} {would or 'has '}ended" if answer else "no daemon was running")
    lines += [f"{would}removed {arena.folder}, {human_bytes(arena.bytes)}" for arena in reaped]
    lines += [_stale_line(arena) for arena in stale]
    emit(fields, text="\n".join(lines))
    if alive and not dry_run:
        note(f"{counted(len(alive), 'live session')} will start another daemon")
    return EXIT_OK


def _await_end(folder: Path, pid: int, runs: set[str] | None, timeout: float) -> None:
    """Wait until the daemon no longer answers, or no longer has these runs. Raises Unavailable after `timeout` s."""
    deadline = time.monotonic() + timeout
    while (answer := _ask(folder)) is not None and answer["pid"] == pid:
        if runs is not None and runs.isdisjoint(run["id"] for run in answer["runs"]):
            return
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
