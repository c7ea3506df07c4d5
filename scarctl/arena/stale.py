"""Find the arenas of dead runs, and remove those without pending copies."""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scarctl.arena.arena import BESIDE
from scarctl.arena.folder import check_private, lock_folder, remove_files
from scarctl.arena.gone import why_gone
from scarctl.arena.header import FILE
from scarctl.arena.kinship import ASIDE
from scarctl.arena.line import fit
from scarctl.arena.owner import read_owner
from scarctl.arena.transfer import sweep_incoming
from scarctl.arena.view import ArenaView, peek, peek_in
from scarctl.errors import Contention, ScarError
from scarctl.state.version import step_of
from scarctl.store import Store
from scarctl.util.document import Document

log = logging.getLogger("scarctl")

DAY = 86400.0
_RUN_ID = re.compile(
    rf"(?P<store>[0-9a-f]{{32}})(\.[0-9a-f]{{16}})?(-(?P<shard>[0-9]{{1,6}}))?({re.escape(ASIDE)})?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class StaleArena(Document):
    """Memory that a run has left on this host: an arena that no live process owns."""

    id: str
    """Id of the store that its run saved to."""
    store: str | None
    """Address of the store; None if unknown."""
    folder: str
    bytes: int
    idle_seconds: float
    """Time since the last memory checkpoint."""
    pid: int
    head_step: int
    durable_step: int
    pending_partitions: int | None
    """None if it cannot be read."""
    durable: bool
    """Whether the store has all of it."""
    foreign: bool
    """Whether it no longer belongs to the store: see `scarctl.arena.kinship`."""
    aside: bool
    """Whether it was set aside: no session will use it again."""
    gone: str | None
    """Why its store is gone for good, in words; None unless that is certain: see `scarctl.arena.gone`."""
    owner: str | None
    """Host that the copy belongs to; None if the memory is this host's own."""

    @property
    def removable(self) -> bool:
        """Whether `reap` removes it."""
        return self.durable or self.aside or self.expired or self.gone is not None

    @property
    def expired(self) -> bool:
        """Whether it is a replica that was unchanged for a day: its host is gone, and no job has requested it.

        A clock that is set after the machine has booted makes a replica of a moment ago look years old.
        """
        return self.owner is not None and min(self.idle_seconds, _uptime()) >= DAY


def survey(folder: Path, live: frozenset[str] = frozenset(), *, place: str | None = None) -> list[StaleArena]:
    """Return the arenas of dead processes in the host folder. Takes no lock, so it disturbs no process.

    live: stores whose runs another process, the daemon, still saves. place: see `reap`.

    Raises AccessDenied if the folder belongs to another user.
    """
    paths = [path for path in run_folders(folder) if place is None or is_at(path.name, place)]
    return [arena for path in paths if path.name not in live and (arena := _look(path)) is not None]


def reap(
    folder: Path, *, older_than: float = 0.0, live: frozenset[str] = frozenset(), place: str | None = None
) -> list[StaleArena]:
    """Remove the arenas of dead runs that are durable or were set aside, or whose store is gone. Return them.

    Also removes replicas of other hosts' arenas, a day after their last change, and what killed processes have left
    that were receiving an arena.

    older_than: only arenas without a change for that many seconds. live: replicas that their owners now send to.
    place: only the arenas of stores at this place, of all ranks: see `is_at`.

    Failures are logged, never raised.
    """
    removed = []
    try:
        for path in run_folders(folder):
            if place is not None and not is_at(path.name, place):
                continue
            if path.name not in live and _age(path) >= older_than and (arena := reap_run(path)) is not None:
                log.info("removed the arena of a dead run: %s, %d bytes", path, arena.bytes)
                removed.append(arena)
        sweep_incoming(folder)
    except (ScarError, OSError) as error:
        log.warning("the search for arenas of dead runs failed: %s", error)
    return removed


def has_unsaved(folder: Path, runs: tuple[str, ...]) -> bool:
    """Return whether the host folder has memory of dead processes that their store lacks, changed within a day.

    runs: beginnings of the ids of the runs that count. Asks no store, so that memory of another line may count.

    Raises AccessDenied if the folder belongs to another user.
    """
    for path in run_folders(folder):
        if path.name.startswith(runs) and not path.name.endswith(ASIDE) and min(_age(path), _uptime()) < DAY:
            view = peek_in(path, path.name)
            if view is not None and not view.alive and view.lacking:
                return True
    return False


def is_at(name: str, place: str) -> bool:
    """Return whether a run of this name, or its arena, is of a store at a place. place: see `Address.digest`."""
    return name[32:].startswith(f".{place}")


def run_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders of arenas, in order of their names. Yields nothing without a host folder."""
    if os.path.lexists(folder):
        check_private(folder)
        yield from sorted(
            path
            for path in folder.iterdir()
            if _RUN_ID.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
        )


def _look(path: Path, *, dead: bool = False) -> StaleArena | None:
    """Return the arena in `path`; None without an arena, or if a process with its id may be its owner."""
    try:
        nbytes = os.stat(path / FILE, follow_symlinks=False).st_size
    except FileNotFoundError:
        return None
    view, owner = peek(str(path.parents[1]), path.name), read_owner(path)
    if view is not None and not dead and view.alive:
        return None
    foreign = view is not None and _is_foreign(path, view)
    return StaleArena(
        id=path.name,
        store=view.place or None if view else None,
        folder=str(path),
        bytes=nbytes,
        idle_seconds=round(_age(path), 3),
        pid=view.pid if view else 0,
        head_step=view.head_step if view else -1,
        durable_step=step_of(int(view.durable.max(initial=-1))) if view else -1,
        pending_partitions=view.pending if view else None,
        durable=view is not None and not view.lacking and not foreign,
        foreign=foreign,
        aside=path.name.endswith(ASIDE),
        gone=why_gone(path, view.place) if view is not None and owner is None else None,
        owner=owner.host if owner else None,
    )


def _is_foreign(path: Path, view: ArenaView) -> bool:
    """Return whether an arena's store is of another line. False if the store is missing, or is not a local folder."""
    run = _RUN_ID.fullmatch(path.name)
    if path.name.endswith(ASIDE):
        return True
    if run is None or not os.path.isabs(view.place):
        return False
    try:
        store = Store.open(view.place)
        if store.id != run["store"]:
            return True
        own = store if run["shard"] is None else store.of_shard(int(run["shard"]))
        return not fit(view.line, own.line())
    except (ScarError, OSError):
        return False


def reap_run(path: Path) -> StaleArena | None:
    """Remove a run's arena, and return it; None if it stays, because copies would be lost or the run is alive."""
    try:
        lock = lock_folder(path, patience=0.0)
    except Contention:
        return None
    except ScarError as error:
        log.warning("%s", error)
        return None
    try:
        arena = _look(path, dead=True)
        if arena is None or not arena.removable:
            return None
        if arena.aside or arena.expired or arena.gone:
            shutil.rmtree(path)
            return arena
        remove_files(path, (FILE, *BESIDE))
        return arena
    finally:
        os.close(lock)


def _age(path: Path) -> float:
    """Return the seconds since a file was put into the folder, or removed from it.

    The time of the arena's file is useless: writing through a map need not change it.
    """
    try:
        return max(0.0, time.time() - path.stat(follow_symlinks=False).st_mtime)
    except FileNotFoundError:
        return 0.0


def _uptime() -> float:
    """Return the seconds since this machine was started; infinity if this system does not report it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else math.inf
