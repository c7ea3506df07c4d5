"""Take over the state that another number of members has saved: see `scarctl.recovery.members`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.adapter import Adapter
from scarctl.arena.arena import Arena
from scarctl.checkpoint.live_state import is_placeholder
from scarctl.config import SessionSettings
from scarctl.distributed.leftover_arenas import save_own
from scarctl.distributed.own_extras import Own, with_own
from scarctl.distributed.owned_adapter import group_of
from scarctl.errors import LayoutMismatch, NoIntactCopy, Unavailable
from scarctl.recovery.label import MEMBERS
from scarctl.recovery.members import Predecessors, overlapping, predecessors
from scarctl.recovery.reshard import with_slots
from scarctl.recovery.shares import as_member
from scarctl.session.peers import AgreedState
from scarctl.state.extras import Extras
from scarctl.state.group import Group, TensorSpec
from scarctl.state.layout import Layout
from scarctl.state.torch_dtypes import torched
from scarctl.state.version import step_of
from scarctl.store import Store, Topology
from scarctl.store.members import earlier, fence


def groups_of(adapter: Adapter) -> list[Group]:
    """Return the live groups, with the slots that exist."""
    return [group_of(group) for group in adapter.groups()]


def end_earlier(
    store: Store,
    topology: Topology,
    number: int,
    adapter: Adapter,
    settings: SessionSettings,
    *,
    sealed: bool,
) -> Predecessors | None:
    """Fence the earlier members whose state member `number` of a topology takes over, and return it.

    Their copies in this host's memory are saved first. store: the whole store. sealed: see `predecessors`.

    Raises Contention if one of them runs on this host; NoIntactCopy if none has a sealed state; Corruption,
    AccessDenied, Unavailable.
    """
    topologies = earlier(store, topology)
    found = predecessors(store, topologies)
    if found is None:
        return None
    shards = overlapping(found, groups_of(adapter), number)
    save_own([store.of_shard(shard) for shard in shards], settings)
    for shard in shards:
        fence(store, shard)
    # From here on nothing changes in these shards.
    last = predecessors(store, topologies, sealed=sealed)
    if sealed and found.saved and (last is None or not last.saved):
        raise NoIntactCopy(
            f"{store.where}: no previous member has an intact sealed state",
            hint="nothing was changed; resume(mode='partial') takes their newest copies",
            kind="no-sealed-state",
        )
    return last


class Heir:
    """The state that one member takes over: see the module, and `scarctl.session.peers.Elsewhere`."""

    def __init__(
        self, found: Predecessors, adapter: Adapter, number: int, count: int, own_extras: frozenset[str]
    ) -> None:
        """Compare the saved state with this member's tensors. Raises as `Predecessors.check` does, and NoIntactCopy."""
        self._found, self._adapter, self._number, self._own_extras = found, adapter, number, own_extras
        live = adapter.groups()
        groups = [group_of(group) for group in live]
        found.check(number, count, groups, adapter.optimizer)
        self._new = [found.is_new(group, number) for group in groups]
        self._live = [group.tensors for group in live]
        self._shard = found.reference(number, groups)
        self._check_optimizer(groups)
        self.layout: Layout = found.parts.store.settings.layout(
            [(g.name, g.kind, self._specs(g), g.place) for g in groups], adapter.optimizer
        )

    def fill(self, arena: Arena) -> AgreedState:
        """See `Elsewhere`. No state of several members is consistent."""
        groups = arena.layout.groups
        taken = [g for g in range(len(groups)) if not self._new[g]]
        wanted = as_member(Layout([groups[g] for g in taken], arena.layout.optimizer), self._number)
        self._found.parts.copy_into(wanted, lambda g, t: arena.rows(taken[g], t), newest_first=True)
        for g in range(len(groups)):
            if self._new[g]:
                self._keep(arena, g)
        state = self._found.parts.states[self._shard]
        saved = self._found.parts.store.read_extras(state)
        if saved is None:
            raise Unavailable(
                f"{self._found.parts.store.url}: the extras of shard {self._shard} were collected meanwhile",
                hint="resume again; nothing was changed",
            )
        extras = self._mixed(Extras.from_tree(torched(saved[1])))
        return AgreedState(step_of(saved[0]), extras, self._found.parts.label.because(MEMBERS))

    def _mixed(self, extras: Extras) -> Extras:
        """Return extras that may be another member's: the random generators of this member are its own."""
        if self._found.numbers[self._shard] == self._number:
            return extras
        return with_own(extras, Own.of(self._adapter.capture()), self._own_extras)

    def _keep(self, arena: Arena, g: int) -> None:
        """Put the live values of a tensor that no member has saved into the arena. Its slots are zeros."""
        for t, spec in enumerate(arena.layout.groups[g].tensors):
            tensor = self._live[g].get(spec.slot)
            rows = arena.rows(g, t)
            rows[...] = 0 if tensor is None or is_placeholder(tensor) else _bytes(tensor).reshape(rows.shape)

    def _specs(self, group: Group) -> tuple[TensorSpec, ...]:
        if not self._found.is_new(group, self._number):
            named = as_member(Layout([group]), self._number).groups[0]
            return with_slots(self._found.parts, named)
        like, parameter = self._found.like(group), group.tensors[0]
        slots = () if like is None else like.tensors[1:]
        return (parameter, *(slot.of(parameter.shape) for slot in slots))

    def _check_optimizer(self, groups: Sequence[Group]) -> None:
        """Raise LayoutMismatch if the optimizer's tensors differ from those of the optimizer whose step counts it
        continues.
        """
        theirs = self._found.parts.states[self._shard].layout
        assert theirs is not None, "a shard with extras has a layout"
        mine, there = ([g.name for g in of if g.kind == "parameter"] for of in (groups, theirs.groups))
        if self._adapter.optimizer and sorted(mine) != sorted(there):
            raise LayoutMismatch(
                f"member {self._number} has the parameters {_listed(mine)}, and member "
                f"{self._found.numbers[self._shard]}, whose optimizer it continues, has {_listed(there)}",
                hint="give all members parameters of the same names; nothing was changed",
            )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
