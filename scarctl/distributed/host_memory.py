"""Bring each rank's newest arena to its host, if a restart has moved ranks to other hosts.

Hosts of the job send it over the process group. With the secret in a file, hosts that the store names and that do not
take part in the start are searched, too (`scarctl.distributed.memory_search`): the newest arena of all is used.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
import torch.distributed as dist

from scarctl.arena.age import Age, age_of
from scarctl.arena.kinship import view_of
from scarctl.arena.transfer import PIECE, Incoming, Outgoing
from scarctl.config import SessionSettings
from scarctl.distributed.collectives import Team
from scarctl.distributed.credentials import Credentials
from scarctl.distributed.host_address import digest_of_place
from scarctl.distributed.memory_search import asker_of, bring, recorded_hosts
from scarctl.errors import ScarError
from scarctl.peers.sender import Candidate
from scarctl.session.opening import claim_saver
from scarctl.store import Store, newest_topology

log = logging.getLogger("scarctl")

_STRETCH = 32 * PIECE
"""Bytes that are moved between two looks at all ranks: 3 MB/s are fast enough for the shortest patience."""

Inventory = Mapping[int, Age]
"""Age of the arena in memory by shard. The newest is chosen."""


class _Head(TypedDict):
    """What precedes the pieces of an arena's file."""

    size: int
    """Bytes of the arena's file that are sent."""
    gap: tuple[int, int]
    """See `scarctl.arena.transfer.Gap`."""
    files: dict[str, bytes]
    """The small files, in order."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """An arena that moves to the host of another rank."""

    shard: int
    source: int
    """Rank at the host that sends it."""
    target: int


def plan_transfers(
    places: Sequence[str], inventories: Sequence[Inventory], shards: Sequence[int]
) -> list[Transfer]:
    """Return the arenas to move: for each rank the newest one of its shard, if it is at another place.

    places: place of each rank's arenas. inventories: by rank; the first rank of each place lists all arenas there.
    shards: shard of each rank.
    """
    found = []
    for target, shard in enumerate(shards):
        own = inventories[places.index(places[target])].get(shard)
        best = _best(inventories, shard)
        if best is not None and (own is None or best[0] > own):
            found.append(Transfer(shard, -best[1], target))
    return found


def bring_memory(
    store: Store,
    settings: SessionSettings,
    team: Team,
    shards: Sequence[int],
    places: Sequence[str],
    credentials: Credentials | None,
) -> bool:
    """Bring the newest arena of this rank's shard to this host. Return whether that was done. A collective.

    places: `place_of` every rank. credentials: those of all ranks; None: hosts outside of the job are not searched.

    The arena at its old place stays: once the shard is saved to from here, it no longer belongs to the store. If
    an arena cannot be moved, a warning says so, and the store's copies are used.

    Raises Unavailable if a rank is gone.
    """
    hosts = _outside(store, team, places, credentials)
    if len(set(places)) == 1 and not hosts:
        return False
    inventories = _inventories(store, settings, team, shards, places)
    fetched = [False] * team.world
    if credentials is not None and hosts:
        ranks = range(team.world)
        fetched = _fetch(store, settings, team, credentials, hosts, shards, ranks, inventories)
    done = [
        _carry_out(transfer, store, settings, team)
        for transfer in plan_transfers(places, inventories, shards)
        if not fetched[transfer.target]
    ]
    return fetched[team.rank] or any(done)


def bring_leftovers(
    store: Store,
    settings: SessionSettings,
    team: Team,
    places: Sequence[str],
    credentials: Credentials | None,
) -> None:
    """Bring memory of the previous set of ranks from hosts outside of the job, where it is newer. A collective.

    Raises Unavailable if a rank is gone.
    """
    hosts = _outside(store, team, places, credentials)
    if credentials is None or not hosts:
        return
    shards = team.collect(lambda: _newest_shards(store) if team.rank == 0 else [])[0]
    inventories = _inventories(store, settings, team, shards, places)
    # What is newer takes the place of what the job's hosts have, which would otherwise be saved first.
    best = [_best(inventories, shard) for shard in shards]
    takers = [n % team.world if one is None else -one[1] for n, one in enumerate(best)]
    _fetch(store, settings, team, credentials, hosts, shards, takers, inventories)


def _newest_shards(store: Store) -> list[int]:
    newest = newest_topology(store)
    return [] if newest is None else list(newest.shards)


def _outside(
    store: Store, team: Team, places: Sequence[str], credentials: Credentials | None
) -> list[Candidate]:
    """Return the daemons of recorded hosts outside of the job. A collective if there are credentials."""
    if credentials is None:
        return []
    own = {digest_of_place(place) for place in places}
    found = [] if team.rank else [[one.host, one.address, one.port] for one in recorded_hosts(store, own)]
    return [Candidate(*fields) for fields in team.from_rank(0, found)]


def _fetch(
    store: Store,
    settings: SessionSettings,
    team: Team,
    credentials: Credentials,
    hosts: Sequence[Candidate],
    shards: Sequence[int],
    takers: Sequence[int],
    inventories: Sequence[Inventory],
) -> list[bool]:
    """Fetch newer memory from hosts outside of the job. Return which ranks have received an arena. A collective.

    takers: rank that fetches each shard. Each host is asked by one rank, about all shards. One rank may have a long way
    to go, as with `peer_bandwidth`, while others have nothing to fetch.
    """
    views = [store.of_shard(shard) for shard in shards]
    than = [None if best is None else best[0] for best in (_best(inventories, shard) for shard in shards)]
    asker = asker_of(credentials)
    mine = range(team.rank, len(hosts), team.world)
    runs = [view.run_id for view in views]
    answers = team.patiently(lambda: asker.ask_all([hosts[n] for n in mine], runs) if asker else [])
    able: dict[int, list[int]] = {}
    for n, at in itertools.chain(*team.gather([[mine[n], at] for n, at, _ in answers])):
        able.setdefault(at, []).append(n)

    def fetch() -> list[bool]:
        return [
            bring(views[at], settings, [hosts[n] for n in able[at]], asker, than[at])
            for at in able
            if asker is not None and takers[at] == team.rank
        ]

    return team.gather(any(team.patiently(fetch)))


def _best(inventories: Sequence[Inventory], shard: int) -> tuple[Age, int] | None:
    """Return age and negated rank of the newest arena of a shard in these inventories; None without one."""
    found = [(inventory[shard], -rank) for rank, inventory in enumerate(inventories) if shard in inventory]
    return max(found, default=None)


def _inventories(
    store: Store, settings: SessionSettings, team: Team, shards: Sequence[int], places: Sequence[str]
) -> list[Inventory]:
    """Return the inventories of all ranks. The first rank of each place lists all arenas there. A collective."""
    lists = places.index(places[team.rank]) == team.rank
    return team.gather(_inventory(store, settings, shards) if lists else {})


def _inventory(store: Store, settings: SessionSettings, shards: Sequence[int]) -> dict[int, Age]:
    """Return the age of each shard's arena in this host's memory, if it belongs to the store."""
    found: dict[int, Age] = {}
    for shard in shards:
        try:
            age = age_of(view_of(settings.arena_dir, store.of_shard(shard)))
        except ScarError as error:
            log.warning("%s: this host's memory of shard %d is not offered to other ranks", error, shard)
            continue
        if age is not None:
            found[shard] = age
    return found


def _carry_out(transfer: Transfer, store: Store, settings: SessionSettings, team: Team) -> bool:
    """Move one arena. Return whether this rank has received it."""
    incoming = None
    view = store.of_shard(transfer.shard)
    with contextlib.ExitStack() as undo:
        outgoing, head = _outgoing(view, settings, undo) if team.rank == transfer.source else (None, None)
        head = team.from_rank(transfer.source, head)
        if head is not None and team.rank == transfer.target:
            incoming = _incoming(view, settings, head)
            if incoming is not None:
                undo.callback(incoming.close)
        if not team.from_rank(transfer.target, incoming is not None):
            return False
        for at in range(0, head["size"], _STRETCH):
            if outgoing is not None:
                send(outgoing, transfer.target, team, at, at + _STRETCH)
            if incoming is not None:
                receive(incoming, transfer.source, team, at, at + _STRETCH)
            team.gather(None)  # ranks that take no part wait for a stretch at a time, not for the whole arena
        digest = team.from_rank(transfer.source, None if outgoing is None else outgoing.digest())
        return incoming is not None and _install(incoming, digest, view)


def _outgoing(
    view: Store, settings: SessionSettings, undo: contextlib.ExitStack
) -> tuple[Outgoing | None, _Head | None]:
    """Open an arena to send, and return its head, too. No daemon saves it until `undo`, so it does not change."""
    try:
        saver = claim_saver(view, settings, lambda request: None)
        undo.callback(view.unlock)
        undo.callback(saver.close)
        if (outgoing := Outgoing.open(view, settings.arena_dir)) is None:
            return None, None
        undo.callback(outgoing.close)
        return outgoing, {"size": outgoing.size, "gap": outgoing.gap, "files": dict(outgoing.files())}
    except ScarError as error:
        log.warning("this host's memory of %s cannot be sent: %s", view.url, error)
        return None, None


def _incoming(view: Store, settings: SessionSettings, head: _Head) -> Incoming | None:
    incoming = None
    try:
        files, (at, size) = head["files"], head["gap"]
        files_size = sum(map(len, files.values()))
        incoming = Incoming(view, settings.arena_dir, head["size"], files_size, (at, size))
        for name, data in files.items():
            incoming.keep(name, data)
        return incoming
    except ScarError as error:
        if incoming is not None:
            incoming.close()
        log.warning("another host's memory of %s cannot be received: %s", view.url, error)
        return None


def _install(incoming: Incoming, digest: str, view: Store) -> bool:
    try:
        incoming.install(digest)
    except ScarError as error:
        log.warning("another host's memory of %s is not used: %s", view.url, error)
        return False
    log.info(
        "%s: brought %d bytes from another host's memory to %s", view.url, incoming.size, incoming.folder
    )
    return True


def send(outgoing: Outgoing, target: int, team: Team, begin: int = 0, end: int | None = None) -> None:
    """Send the pieces of an arena's file to another rank, which calls `receive` with the same part of the file.

    begin, end: bytes, multiples of `PIECE`. Raises Unavailable if the other rank is gone.
    """
    for at, size in _pieces(outgoing.size, begin, end):
        chunk = torch.from_numpy(outgoing.read(at, size))
        team.collectively(lambda chunk=chunk: dist.send(chunk, target, group=team.group))  # type: ignore[misc]


def receive(incoming: Incoming, source: int, team: Team, begin: int = 0, end: int | None = None) -> None:
    """Receive the pieces that another rank sends with `send`. Raises Unavailable if it is gone."""
    buffer = torch.empty(min(PIECE, incoming.size), dtype=torch.uint8)
    for at, size in _pieces(incoming.size, begin, end):
        chunk = buffer[:size]
        team.collectively(lambda chunk=chunk: dist.recv(chunk, source, group=team.group))  # type: ignore[misc]
        incoming.write(at, chunk.numpy())


def _pieces(size: int, begin: int, end: int | None) -> Iterator[tuple[int, int]]:
    """Yield where the pieces of a part of a file of `size` bytes begin, and their bytes."""
    for at in range(begin, size if end is None else min(size, end), PIECE):
        yield at, min(PIECE, size - at)
