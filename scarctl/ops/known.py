"""Find the stores that this host's daemon and arenas know."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scarctl.arena.folder import host_folder
from scarctl.arena.gone import why_gone
from scarctl.arena.header import TOLD
from scarctl.arena.owner import read_owner
from scarctl.arena.stale import is_at, run_folders
from scarctl.arena.view import peek
from scarctl.daemon.client import ask_status
from scarctl.daemon.lifecycle import Phase
from scarctl.daemon.status import DaemonStatus, RunStatus, part_of
from scarctl.errors import UsageError
from scarctl.store import Store
from scarctl.store.backends.address import Address
from scarctl.util.text import counted

log = logging.getLogger("scarctl")

_PATIENCE = 5.0
_LISTED = 8
"""Runs that an error names."""


def daemon_here(arena_dir: str | None) -> DaemonStatus | None:
    """Return the status of this host's daemon; None if no daemon runs. Raises Unavailable if it does not answer."""
    return ask_status(host_folder(arena_dir), patience=_PATIENCE)


def runs_of(daemon: DaemonStatus | None, run_id: str) -> list[RunStatus]:
    """Return the daemon's reports on the runs of one store: one process alone, or ranks with a shard each."""
    runs = daemon["runs"] if daemon is not None else []
    return [run for run in runs if run["id"] == run_id or run["id"].startswith(f"{run_id}-")]


def runs_at(daemon: DaemonStatus | None, place: str | None) -> list[RunStatus]:
    """Return the daemon's reports on the runs that save to a place: see `is_at`; None: on all."""
    runs = daemon["runs"] if daemon is not None else []
    return [run for run in runs if place is None or is_at(run["id"], place)]


def place_of(url: str | None) -> str | None:
    """Return the place of a store, which need not be there: see `Address.digest`. Raises UsageError."""
    return None if url is None else Address.parse(url).digest


def require_store(url: str) -> None:
    """Raise NoStore or Corruption if a local folder is no store. A remote place is not asked: it may not answer."""
    if Address.parse(url).root is not None:
        Store.open(url)


def described(run: RunStatus) -> str:
    """Return a run of the daemon in words: its store, its process, and whether that lives."""
    who = f", {part_of(run)}" if part_of(run) else ""
    lives = "training" if run["phase"] == Phase.ATTACHED.value else "dead"
    return f"{run['store']}{who}: process {run['pid']}, {lives}"


def unchosen(command: str, runs: Sequence[RunStatus], folders: Sequence[str] = ()) -> UsageError:
    """Return the error of a command that was not told on which of the host's runs to act."""
    named = [described(run) for run in runs] + [f"memory in {folder}" for folder in folders]
    more = f"; and {len(named) - _LISTED} more" if len(named) > _LISTED else ""
    there = (
        f"{counted(len(named), 'run')} here: {'; '.join(named[:_LISTED])}{more}"
        if named
        else "no run is here"
    )
    return UsageError(
        f"{command} has to be told on which runs of this host to act; {there}",
        hint="`--store URL` for those of one store, `--all` for all of them; with `--dry-run` it only says which",
    )


@dataclass(frozen=True, slots=True)
class GoneStore:
    """A store that is gone for good, and memory that a dead run has left for it."""

    url: str
    why: str
    """In words: see `scarctl.arena.gone`."""
    pid: int
    """Process id of the dead run."""
    folder: Path
    """Folder of its arena."""


def known_stores(daemon: DaemonStatus | None, arena_dir: str | None) -> tuple[list[str], list[GoneStore]]:
    """Return the addresses of stores that runs on this host save to, or have left copies for, in order.

    Then the stores of dead runs that are gone, of which `say_once` was not told yet.

    Raises AccessDenied if the folder of arenas belongs to another user.
    """
    runs = daemon["runs"] if daemon is not None else []
    found, gone, saved = {run["store"] for run in runs}, [], {run["id"] for run in runs}
    for path in run_folders(host_folder(arena_dir)):
        view = peek(arena_dir, path.name)
        if view is None or not view.place:
            continue
        dead = path.name not in saved and not view.alive and read_owner(path) is None
        why = why_gone(path, view.place) if dead else None
        if why is None:
            found.add(view.place)
        elif not (path / TOLD).exists():
            gone.append(GoneStore(view.place, why, view.pid, path))
    return sorted(found), gone


def say_once(gone: GoneStore) -> None:
    """Note that a user was told that a store is gone, so that it is not listed again."""
    try:
        (gone.folder / TOLD).touch(mode=0o600)
    except OSError as error:
        log.warning("%s: %s", gone.folder / TOLD, error.strerror)
