"""Find the stores that this host's daemon and arenas know."""

from __future__ import annotations

from scarctl.arena.folder import host_folder
from scarctl.arena.stale import run_folders
from scarctl.arena.view import peek
from scarctl.daemon.client import ask_status
from scarctl.daemon.status import DaemonStatus, RunStatus

_PATIENCE = 5.0


def daemon_here(arena_dir: str | None) -> DaemonStatus | None:
    """Return the status of this host's daemon; None if no daemon runs. Raises Unavailable if it does not answer."""
    return ask_status(host_folder(arena_dir), patience=_PATIENCE)


def runs_of(daemon: DaemonStatus | None, run_id: str) -> list[RunStatus]:
    """Return the daemon's reports on the runs of one store: one process alone, or ranks with a shard each."""
    runs = daemon["runs"] if daemon is not None else []
    return [run for run in runs if run["id"] == run_id or run["id"].startswith(f"{run_id}-")]


def known_stores(daemon: DaemonStatus | None, arena_dir: str | None) -> list[str]:
    """Return the addresses of stores that runs on this host save to, or have left copies for, in order.

    Raises AccessDenied if the folder of arenas belongs to another user.
    """
    found = {run["store"] for run in daemon["runs"]} if daemon is not None else set()
    for path in run_folders(host_folder(arena_dir)):
        view = peek(arena_dir, path.name)
        if view is not None and view.place:
            found.add(view.place)
    return sorted(found)
