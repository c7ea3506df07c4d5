"""Finish the work of a previous set of ranks: save their arenas to the store, and fence their writers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial

from scarctl.arena.folder import arena_folder
from scarctl.arena.header import FILE
from scarctl.arena.kinship import take, view_of
from scarctl.arena.owner import read_owner
from scarctl.arena.view import peek
from scarctl.config import SessionSettings
from scarctl.distributed.collectives import Team
from scarctl.distributed.host_address import place_of
from scarctl.errors import ScarError, Unavailable
from scarctl.session.opening import claim_saver
from scarctl.store import Store, newest_topology, open_writer, topology_epochs
from scarctl.store.members import PATIENCE, patiently
from scarctl.store.topology import read_topology

log = logging.getLogger("scarctl")


def save_leftovers(store: Store, settings: SessionSettings, team: Team) -> None:
    """Save the pending copies in all arenas of this store, on all hosts. Then remove these arenas.

    Arenas come before their replicas on other hosts. If an arena exists, its replicas are set aside.

    Raises Unavailable on every rank if the copies are not durable within `timeout` seconds.
    """
    # The lowest rank of every place saves the arenas there.
    places = team.gather(place_of(settings))
    first = places.index(places[team.rank]) == team.rank
    found = _arenas(store, settings) if first else []
    own = [view for view, replica in found if not replica]
    team.agree(lambda: _save(own, settings))
    replicas = {view.run_id: view for view, replica in found if replica}
    ages = team.gather(
        {run: age for run, view in replicas.items() if (age := _age(view, settings)) is not None}
    )
    mine = [
        view for run, view in replicas.items() if run in ages[team.rank] and _best(run, ages) == team.rank
    ]
    team.agree(lambda: _save(mine, settings))


def fence(store: Store) -> None:
    """Claim a term in the newest topology's lanes, so that a job that still runs elsewhere is fenced.

    Raises Contention if that job runs on this host.
    """
    newest = newest_topology(store)
    for view in [store] if newest is None else [store.of_shard(shard) for shard in newest.shards]:
        layout = view.current_layout()
        if layout is not None:
            open_writer(view, layout=layout).close()


def _best(run: str, ages: Sequence[Mapping[str, Sequence[int]]]) -> int:
    """Return the rank whose host has the newest replica of a run. ages: epoch and step by run, of each rank."""
    return max(
        (rank for rank, of in enumerate(ages) if run in of), key=lambda rank: (*ages[rank][run], -rank)
    )


def _age(view: Store, settings: SessionSettings) -> list[int] | None:
    """Return epoch and step of a replica; None if it does not belong to the store."""
    try:
        seen = view_of(settings.arena_dir, view)
    except ScarError as error:
        log.warning("%s: a replica in this host's memory is not saved: %s", view.url, error)
        return None
    return None if seen is None else [seen.epoch, seen.head_step]


def _arenas(store: Store, settings: SessionSettings) -> list[tuple[Store, bool]]:
    """Return the views of this store with an arena on this host, and whether that arena is a replica."""
    # If the store never answered a rank, that rank has an arena, but perhaps no folder in the store.
    named = (read_topology(store, epoch).shards for epoch in topology_epochs(store))
    shards = sorted({*store.shards(), *(shard for found in named for shard in found)})
    views = [store, *(store.of_shard(shard) for shard in shards)]
    folders = [arena_folder(settings.arena_dir, view.run_id) for view in views]
    return [
        (view, read_owner(folder) is not None)
        for view, folder in zip(views, folders, strict=True)
        if (folder / FILE).exists()
    ]


def save_own(views: Sequence[Store], settings: SessionSettings) -> None:
    """Save the pending copies in the arenas of these shards on this host, and remove the arenas. See `save_leftovers`.

    Another process may be doing the same: then this one waits, shard by shard. Raises Contention if a process still
    saves to one of the shards.
    """
    for view in views:
        patiently(partial(_save_if_left, view, settings), partial(_patience, view, settings))


def _save_if_left(view: Store, settings: SessionSettings) -> None:
    if (arena_folder(settings.arena_dir, view.run_id) / FILE).exists():
        _save_one(view, settings)


def _patience(view: Store, settings: SessionSettings) -> float:
    """Return the seconds to wait for a shard: as long as saving may take, unless the arena's own process lives."""
    left = peek(settings.arena_dir, view.run_id)
    return PATIENCE if left is None or left.alive else PATIENCE + settings.timeout


def _save(views: Sequence[Store], settings: SessionSettings) -> None:
    for view in views:
        _save_one(view, settings)


def _save_one(view: Store, settings: SessionSettings) -> None:
    folder = arena_folder(settings.arena_dir, view.run_id)
    saver = claim_saver(view, settings, lambda request: None)
    try:
        arena = take(folder, view)
        if arena is None:
            return
        try:
            saver.open(arena)
            arena.adopt()
            saver.resume()
            saver.notify()
            if not saver.drain(settings.timeout):
                raise Unavailable(
                    f"{view.url}: copies that an earlier run left in {folder} are not saved yet: {saver.fault()}",
                    hint="retry after some time; nothing is lost",
                )
            if not arena.lacking():
                log.info("%s: saved the copies that an earlier run left in memory", view.url)
                arena.remove()
        finally:
            arena.close()
    finally:
        saver.close()
        view.unlock()
