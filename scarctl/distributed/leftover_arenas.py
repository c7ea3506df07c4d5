"""Finish the work of a previous set of ranks: save their arenas to the store, and fence their writers."""

from __future__ import annotations

import logging
import socket

from scarctl.arena.folder import arena_folder
from scarctl.arena.header import FILE
from scarctl.arena.kinship import take
from scarctl.arena.queue import HandOverQueue
from scarctl.config import SessionSettings
from scarctl.daemon.claim import claim_saver
from scarctl.distributed.collectives import Team
from scarctl.errors import Unavailable
from scarctl.persist.persister import adopt_orphans
from scarctl.store import Store, newest_topology, open_writer, topology_epochs
from scarctl.store.topology import read_topology

log = logging.getLogger("scarctl")


def save_leftovers(store: Store, settings: SessionSettings, team: Team) -> None:
    """Save the pending copies in all arenas of this store, on all hosts. Then remove these arenas.

    Raises Unavailable on every rank if the copies are not durable within `timeout` seconds.
    """
    # The lowest rank of every host saves the arenas of that host.
    hosts = team.gather(socket.gethostname())
    first = hosts.index(hosts[team.rank]) == team.rank
    team.agree(lambda: _save(store, settings) if first else None)


def fence(store: Store) -> None:
    """Begin an epoch in the newest topology's logs, so that a job that still runs elsewhere is fenced.

    Raises Contention if that job runs on this host.
    """
    newest = newest_topology(store)
    for view in [store] if newest is None else [store.of_shard(shard) for shard in newest.shards]:
        layout = view.current_layout()
        if layout is not None:
            open_writer(view, layout=layout, shard_of=view.shard_of(layout)).close()


def _save(store: Store, settings: SessionSettings) -> None:
    # If the store never answered a rank, that rank has an arena, and perhaps no folder in the store.
    named = (read_topology(store, epoch).shards for epoch in topology_epochs(store))
    shards = sorted({*store.shards(), *(shard for found in named for shard in found)})
    for view in [store, *(store.of_shard(shard) for shard in shards)]:
        folder = arena_folder(settings.arena_dir, view.run_id)
        if (folder / FILE).exists():
            _save_one(view, settings)


def _save_one(view: Store, settings: SessionSettings) -> None:
    folder = arena_folder(settings.arena_dir, view.run_id)
    saver = claim_saver(view, settings, lambda wish: None)
    try:
        arena = take(folder, view)
        if arena is None:
            return
        try:
            saver.open(arena)
            queue = HandOverQueue(arena.folder)
            adopt_orphans(arena, queue)
            saver.resume()
            saver.notify()
            if not saver.drain(settings.timeout):
                raise Unavailable(
                    f"{view.url}: copies that an earlier run left in {folder} are not saved yet: {saver.fault()}",
                    hint="retry in a while; nothing is lost",
                )
            if not arena.pending().any():
                log.info("%s: saved the copies that an earlier run left in memory", view.url)
                arena.remove()
        finally:
            arena.close()
    finally:
        saver.close()
        view.unlock()
