"""A rank has died, and others hold copies of what it owned: they put its newest values into its arena.

Under `DistributedDataParallel` every rank has all parameters, and each saves a part. What a dead rank has left in this
host's memory is as old as its last checkpoint; what the survivors have is as new as theirs. So nothing is lost as long
as one of them lives.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from scarctl.adapter import StateGroup
from scarctl.config import SessionSettings
from scarctl.daemon.arena import Arena
from scarctl.daemon.arenafile import FILE
from scarctl.daemon.folder import arena_folder
from scarctl.daemon.handover import HandOverQueue
from scarctl.errors import Contention
from scarctl.layout import Layout
from scarctl.live import LiveState
from scarctl.ranks.holdings import Division
from scarctl.store import Store
from scarctl.version import pack, step_of

log = logging.getLogger("scarctl")

SECONDS = 0.5
"""How long to look for dead ranks: their end and its consequences come at about the same time."""
_PAUSE = 0.02


class Rescue:
    """What one rank can do for the others. It reads live tensors: nothing may write to them meanwhile."""

    def __init__(self, division: Division, rank: int, shards: Sequence[int]) -> None:
        self._shards = shards
        self._rank = rank
        self._held = _held_for_others(division, rank)

    @property
    def possible(self) -> bool:
        """Whether this rank holds all that some other one owns."""
        return bool(self._held)

    def run(
        self, store: Store, settings: SessionSettings, groups: Sequence[StateGroup], step: int, extras: Any
    ) -> list[int]:
        """Bring what dead ranks of this host owned up to `step` in their arenas; returns these ranks.

        groups: all that this rank holds. extras: of the step; random numbers are each rank's own and left out.
        Never raises: it is done when things go wrong already, and what fails is logged.
        """
        extras = {**extras, "early": {**extras["early"], "rng": None}}
        waiting, rescued = dict(self._held), []
        deadline = time.monotonic() + SECONDS
        while waiting:
            for rank, held in list(waiting.items()):
                shard = self._shards[rank]
                try:
                    done = _bring_up(store.of_shard(shard), settings, held, groups, step, extras)
                except Contention:
                    continue  # it lives, or another survivor is at it
                except Exception as error:
                    log.warning("what rank %d owned cannot be brought up to step %d: %s", rank, step, error)
                    done = False
                del waiting[rank]
                if done:
                    rescued.append(rank)
            if time.monotonic() > deadline:
                break
            time.sleep(_PAUSE)
        if rescued:
            log.warning("rank %d has kept what ranks %s owned, at step %d", self._rank, rescued, step)
        return rescued


_Held: TypeAlias = dict[str, tuple[int, int, int]]
"""By stored name: my group, and the rows of it that the owner owns."""


def _held_for_others(division: Division, rank: int) -> dict[int, _Held]:
    """By owner; only those of whom I hold all."""
    held: dict[int, _Held] = {}
    for copy in division.copies:
        if rank in copy.holders.sharing and copy.owner != rank:
            mine = (copy.holders.groups[rank], copy.start, copy.stop)
            held.setdefault(copy.owner, {})[copy.holders.name] = mine
    return {
        owner: parts
        for owner, parts in held.items()
        if all(
            part.name in parts and parts[part.name][1:] == (part.start, part.stop)
            for part in division.owned[owner]
        )
    }


def _bring_up(
    store: Store,
    settings: SessionSettings,
    held: _Held,
    groups: Sequence[StateGroup],
    step: int,
    extras: Any,
) -> bool:
    """False when there is nothing to do. Raises Contention while the owner lives."""
    folder = arena_folder(settings.arena_dir, store.run_id)
    if not (folder / FILE).exists():
        return False
    arena = Arena.open_existing(folder, run_id=store.run_id, patience=0.0)
    if arena is None:
        return False
    try:
        queue = HandOverQueue(arena.folder)
        last = queue.pending()[-1:]
        # It has done so itself, or one more iteration.
        if step_of(arena.sealed) >= step or any(h.sealed and step_of(h.version) >= step for h in last):
            return False
        live = LiveState(arena.layout, _tensors(arena.layout, held, groups), arena)
        changed = live.changed() | ~arena.intact()
        finite = np.isfinite(live.distances())
        version = pack(arena.epoch, step)
        ids = np.flatnonzero(changed & finite)
        live.save(ids, version)
        queue.put(version=version, ids=ids, sealed=bool(finite[changed].all()), extras=extras)
        arena.head_step = step
    finally:
        arena.close()
    return True


def _tensors(layout: Layout, held: _Held, groups: Sequence[StateGroup]) -> list[list[torch.Tensor]]:
    """My tensors, parallel to the owner's layout."""
    found = []
    for group in layout.groups:
        number, start, stop = held[group.name]
        tensors = groups[number].tensors
        row = [tensors[spec.slot] for spec in group.tensors]
        found.append([t.narrow(0, start, stop - start) if t.dim() else t for t in row])
    return found
