"""Bring a dead rank's arena up to date, from the copies that surviving ranks hold of its rows.

Under `DistributedDataParallel` every rank has all parameters, and each saves a part. The arena of a dead rank is as old
as its last checkpoint. The survivors have the newest values of its rows, so nothing is lost while one of them lives.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import torch

from scarctl.adapter import StateGroup
from scarctl.arena.arena import Arena
from scarctl.arena.extras import carry_extras, read_extras, write_extras
from scarctl.arena.folder import arena_folder
from scarctl.arena.header import FILE
from scarctl.arena.kinship import is_kin
from scarctl.arena.owner import disown, read_owner
from scarctl.checkpoint.live_state import LiveState
from scarctl.config import SessionSettings
from scarctl.distributed.own_extras import NOTHING, Own, with_own
from scarctl.distributed.ownership import Division
from scarctl.errors import Contention, Unavailable
from scarctl.state.caveats import Caveat
from scarctl.state.common import RESCUED
from scarctl.state.extras import Extras, Notes
from scarctl.state.torch_dtypes import torch_of
from scarctl.state.version import pack, step_of
from scarctl.store import Store

log = logging.getLogger("scarctl")

SECONDS = 0.5
"""Seconds to look at a rank's arena: another rank may see the failure before the dead rank's process has ended. A
replica is left to its owner until it has not changed for so long."""
MOST = 5.0
"""Most seconds to look at a replica that changes."""
GRACE_SHARE = 0.1
"""Largest fraction of a grace period to look at one: the evacuation comes after this."""
_PAUSE = 0.02


class Rescue:
    """The help of one rank for dead ranks. It reads live tensors, which must not change meanwhile."""

    def __init__(
        self, division: Division, rank: int, shards: Sequence[int], rank_extras: Collection[str] = ()
    ) -> None:
        """Take the division and this rank. rank_extras: names of extras that every rank saves itself."""
        self._rank_extras = rank_extras
        self._shards = shards
        self._rank = rank
        self._held = _held_for_others(division, rank)

    @property
    def possible(self) -> bool:
        """Whether this rank holds rows that another one owns."""
        return bool(self._held)

    def run(
        self,
        store: Store,
        settings: SessionSettings,
        groups: Sequence[StateGroup],
        step: int,
        extras: Extras,
        whole: str = "",
    ) -> list[int]:
        """Bring the arenas of dead ranks on this host up to `step`, and return these ranks.

        groups: all groups that this rank holds.
        extras: extras of that step.
        whole: the name of the whole state at that step, "" if it has none.

        Never raises, because it runs after another failure. Its own failures are logged.
        """
        waiting, rescued = dict(self._held), []
        looks = {rank: Looks(time.monotonic(), settings.grace) for rank in waiting}
        while waiting:
            for rank, held in list(waiting.items()):
                shard, last = self._shards[rank], True
                try:
                    view = store.of_shard(shard)
                    last = looks[rank].last(_copies_received(view, settings), time.monotonic())
                    done = _bring_up(
                        view, settings, held, groups, step, extras, whole, self._rank_extras, late=last
                    )
                except Contention:  # the owner lives, or another survivor has opened its arena
                    if not last:
                        continue
                    done = False
                except Exception as error:
                    log.warning("the rows of rank %d cannot be brought up to step %d: %s", rank, step, error)
                    done = False
                del waiting[rank]
                if done:
                    rescued.append(rank)
            if waiting:
                time.sleep(_PAUSE)
        if rescued:
            log.warning("rank %d has kept the rows of dead ranks %s, at step %d", self._rank, rescued, step)
        return rescued


class Looks:
    """Decides how often to look at the arena of one rank. Times are seconds on one monotonic clock."""

    def __init__(self, now: float, grace: float | None = None) -> None:
        """Begin now. grace: seconds from SIGTERM to SIGKILL, if they are known."""
        most = MOST if grace is None else min(MOST, GRACE_SHARE * grace)
        self._seen = 0
        self._until, self._latest = now + SECONDS, now + max(SECONDS, most)

    def last(self, received: int, now: float) -> bool:
        """Return whether this look is the last one. received: a number that changes with each copy that arrives."""
        if received != self._seen:
            self._seen, self._until = received, min(now + SECONDS, self._latest)
        return now > self._until


_OLDER = Caveat(
    RESCUED,
    "a rank died, and its own state (random numbers, extras with per_rank) is older than this step: random numbers "
    "that the loop draws, as for dropout, differ",
)
_Held: TypeAlias = dict[str, tuple[int, int, int]]
"""Index of this rank's group, and start and stop of the owner's rows in it, by stored name."""


def _held_for_others(division: Division, rank: int) -> dict[int, _Held]:
    """Return the rows that this rank holds for others, by owner. An owner may own more rows, without copies."""
    held: dict[int, _Held] = {}
    for copy in division.copies:
        if rank in copy.holders.sharing and copy.owner != rank:
            mine = (copy.holders.groups[rank], copy.start, copy.stop)
            held.setdefault(copy.owner, {})[copy.holders.name] = mine
    for owner, parts in held.items():
        whole = {
            part.name
            for part in division.owned[owner]
            if parts.get(part.name, ())[1:] == (part.start, part.stop)
        }
        held[owner] = {name: mine for name, mine in parts.items() if name in whole}
    return held


def _copies_received(store: Store, settings: SessionSettings) -> int:
    """Return a number that changes with each copy in the replica of this store's run on this host; 0 without one."""
    folder = arena_folder(settings.arena_dir, store.run_id)
    if read_owner(folder) is None:
        return 0
    arena = Arena.share(folder, run_id=store.run_id)
    return 0 if arena is None else int(arena.slot.moment + arena.spare.moments.sum())


def _bring_up(
    store: Store,
    settings: SessionSettings,
    held: _Held,
    groups: Sequence[StateGroup],
    step: int,
    extras: Extras,
    whole: str,
    names: Collection[str],
    *,
    late: bool,
) -> bool:
    """Update the owner's arena. Return whether it was out of date, and is complete now.

    late: also a replica, although its owner may still send to it. Raises Contention while the owner
    lives, or may live.
    """
    folder = arena_folder(settings.arena_dir, store.run_id)
    if not (folder / FILE).exists():
        return False
    arena = Arena.open_existing(folder, run_id=store.run_id, patience=0.0)
    if arena is None:
        return False
    try:
        if not _is_of(arena, store):
            log.warning("%s: the arena in %s does not belong to this run", store.url, folder)
            return False
        arena.settle()
        # The owner has this step in memory as a whole, or a later one.
        if arena.whole and step_of(arena.slot.head) >= step:
            return False
        if not late and read_owner(folder) is not None:
            raise Contention(f"{folder}: its owner may still send to it")
        mine = np.zeros(arena.layout.partitions, dtype=bool)
        for g, group in enumerate(arena.layout.groups):
            mine[arena.layout.base[g] : arena.layout.base[g + 1]] = group.name in held
        live = LiveState(arena.layout, _tensors(arena, held, groups), arena)
        changed = mine & (live.changed() | ~arena.intact())
        finite = np.isfinite(live.distances())
        version, ids = pack(arena.epoch, step), np.flatnonzero(changed & finite)
        all_of_it = bool(whole and mine.all() and finite[changed].all())
        disown(folder)  # if its host still sends, its copies are older
        if not (all_of_it or ids.size):
            return True
        begun = arena.begin_moment(flush=True)
        assert begun is not None
        slot, moment = begun
        live.save(ids, slot, version, moment)
        there = slot.moments != moment
        arena.carry(np.flatnonzero(there))
        if not slot.intact().all():
            log.warning("%s: this process does not have all rows that are missing in %s", store.url, folder)
            return False
        all_of_it = all_of_it and not there[ids].any()  # another thread may keep writing to some
        arena.note_distances(np.nan, ids)  # only the owner knew how far the store's copies are
        if all_of_it:
            found = read_extras(arena)
            known = None if found is None or found.tree is None else Extras.from_tree(found.tree)
            older = found is None or step_of(found.version) < step
            tree = _for_owner(extras, known, names, older=older).to_tree()
            write_extras(folder, slot.number, moment, tree)
            arena.flip(slot, moment, version, whole)
            arena.reach(step)
        else:  # the other copies are older: extras of `step` would not match them
            carry_extras(arena, moment)
            slot.version[there] = arena.newest()[there]
            arena.flip(slot, moment, arena.slot.head, "")
        arena.ask(whole=True)
    finally:
        arena.close()
    return True


def _is_of(arena: Arena, store: Store) -> bool:
    try:
        return is_kin(arena, store)
    except Unavailable:
        return True  # the session or daemon that opens the arena asks again


def _for_owner(extras: Extras, known: Extras | None, names: Collection[str], *, older: bool) -> Extras:
    """Return the survivor's extras. Parts that every rank saves itself come from `known`, the owner's newest extras.

    older: `known` is of an earlier step.
    """
    own, notes = (NOTHING, Notes()) if known is None else (Own.of(known.state), known.notes)
    notes = extras.notes.of_part(notes)
    caveats = (*notes.caveats, _OLDER) if older else notes.caveats
    return replace(with_own(extras, own, names), notes=replace(notes, caveats=caveats))


def _tensors(arena: Arena, held: _Held, groups: Sequence[StateGroup]) -> list[list[torch.Tensor]]:
    """Return this rank's tensors, parallel to the owner's layout; the arena's own rows where this rank has none."""
    found = []
    for g, group in enumerate(arena.layout.groups):
        if group.name not in held:
            copies = [torch.from_numpy(arena.rows(g, t)).view(-1) for t in range(len(group.tensors))]
            found.append(
                [c.view(torch_of(s.dtype)).view(s.shape) for c, s in zip(copies, group.tensors, strict=True)]
            )
            continue
        number, start, stop = held[group.name]
        tensors = groups[number].tensors
        row = [tensors[spec.slot] for spec in group.tensors]
        found.append([t.narrow(0, start, stop - start) if t.dim() else t for t in row])
    return found
