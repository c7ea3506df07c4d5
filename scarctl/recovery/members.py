"""Find the state that another number of members has saved, for the members that take it over.

Each row is taken from the newest members that have saved it. A member that never took over its rows has saved nothing:
the previous members still have them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import Corruption, LayoutMismatch, NoIntactCopy, UsageError
from scarctl.recovery.reshard import Parts, check_fits
from scarctl.recovery.shares import as_member
from scarctl.state.group import Group
from scarctl.state.layout import Layout
from scarctl.store import ShardState, Store
from scarctl.store.members import covered, name_among, rows_of
from scarctl.store.topology import Topology

_HINT = "nothing was changed; see docs/members.md"


@dataclass(frozen=True, slots=True)
class Predecessors:
    """The state of earlier members, newest first."""

    parts: Parts
    numbers: dict[int, int]
    """The number of the member of each shard."""
    topologies: tuple[Topology, ...]

    @property
    def saved(self) -> bool:
        """Whether any of these members has saved a partition."""
        return any(state.saved.any() for state in self.parts.states.values())

    @property
    def names(self) -> set[str]:
        """Names of all groups."""
        return {group.name for layout in self.parts.named.values() for group in layout.groups}

    def check(self, number: int, count: int, groups: Sequence[Group], optimizer: str) -> None:
        """Raise unless member `number` of `count`, with these groups, can take its part over.

        Raises UsageError (kind "members-own-state") if no new member could take an ending member's state. Raises
        UsageError (kind "members-overlap") if two earlier members have the same rows. Raises LayoutMismatch for another
        model.
        """
        self._check_ending(count)
        self._check_overlaps()
        taken = [group for group in groups if not self.is_new(group, number)]
        named = as_member(Layout(taken, optimizer), number).groups
        fresh = [group for group in groups if group not in taken]
        known = {name.rpartition("@")[0] for name in self.names}
        unknown = next((group.name for group in fresh if group.name not in known), None)
        if unknown is not None or (fresh and number < self._had):
            raise LayoutMismatch(
                f"the model is not the one in {self.parts.store.url}: tensor {unknown or fresh[0].name!r} new",
                hint=_HINT,
            )
        own = {name for name in self.names if name.endswith(f"@{number}")}
        check_fits(self.parts, named, {group.name for group in named} | (self.names - own), optimizer)

    def check_complete(self) -> None:
        """Raise UsageError (kind "members-incomplete") unless each row of every divided tensor was saved."""
        spans: dict[str, list[tuple[int, int]]] = {}
        totals: dict[str, int] = {}
        for shard, layout in self.parts.named.items():
            state = self.parts.states[shard]
            saved = np.zeros(layout.partitions, bool)
            saved[state.ids] = state.saved
            for g, group in enumerate(layout.groups):
                if group.place is not None:
                    totals[group.name] = group.place.shape[0] if group.nbytes else 0
                    spans.setdefault(group.name, []).extend(_saved_rows(layout, g, saved))
        for name, total in totals.items():
            if not covered((0, total), spans[name]):
                raise UsageError(
                    f"{self.parts.store.url}: the {self._had} previous members never saved some of the "
                    f"{total} rows of {name!r}",
                    hint="start them, and let each save once; nothing was changed",
                    kind="members-incomplete",
                )

    def is_new(self, group: Group, number: int) -> bool:
        """Return whether a group belongs to member `number` alone, and no earlier member had it."""
        return group.place is None and name_among(group, number) not in self.names

    def like(self, group: Group) -> Group | None:
        """Return a member's own group of this name, as a model for the slots of a new group; None without one."""
        found = (one for layout in self.parts.named.values() for one in layout.groups if one.place is None)
        return next((one for one in found if one.name.rpartition("@")[0] == group.name), None)

    def reference(self, number: int, groups: Sequence[Group]) -> int:
        """Return the shard whose extras member `number` continues: its own, or the one with most bytes of its rows.

        Raises NoIntactCopy if no such shard has saved extras.
        """
        states = self.parts.states
        mine = [shard for shard, of in self.numbers.items() if of == number]
        wanted = {group.name: group for group in groups if group.place is not None}

        def common(shard: int) -> int:
            return sum(
                _common(wanted[group.name], group) * group.row_bytes
                for group in self.parts.named[shard].groups
                if group.place is not None and group.name in wanted
            )

        for shard in [*mine, *sorted(self.numbers, key=common, reverse=True)]:
            if states[shard].extras is not None:
                return shard
        raise NoIntactCopy(
            f"{self.parts.store.url} has no extras: the optimizer's step counts and the states of random generators "
            "were never saved"
        )

    @property
    def _had(self) -> int:
        """The number of members of the newest topology."""
        return self.topologies[0].world

    def _check_ending(self, count: int) -> None:
        for shard, number in self.numbers.items():
            own = [group.name for group in self.parts.named[shard].groups if group.place is None]
            if own and number >= count:
                raise UsageError(
                    f"{self.parts.store.url}: member {number} has tensors of its own ({', '.join(own[:5])}), and none "
                    f"of {count} members can take them over",
                    hint="name tensors that are parts of common ones in divided=, from the store's first start on; "
                    "`scarctl export` gives their values to a new store. Nothing was changed",
                    kind="members-own-state",
                )

    def _check_overlaps(self) -> None:
        for topology in self.topologies:
            found: dict[str, list[tuple[int, int, int]]] = {}
            for shard in topology.shards:
                for group in self.parts.named[shard].groups if shard in self.numbers else ():
                    if group.place is not None:
                        found.setdefault(group.name, []).append((*rows_of(group), self.numbers[shard]))
            for name, spans in found.items():
                spans.sort()
                for (_, stop, one), (start, _, other) in pairwise(spans):
                    if start < stop:
                        raise UsageError(
                            f"{self.parts.store.url}: members {one} and {other} both have row {start} of {name!r}",
                            hint="it is unknown which are right; `scarctl recover` restores each into a file",
                            kind="members-overlap",
                        )


def predecessors(
    store: Store, topologies: Sequence[Topology], *, sealed: bool = False
) -> Predecessors | None:
    """Read the state that the members of these topologies (newest first) have saved; None if no member has begun.

    sealed: take each member's newest sealed state instead of the newest copy of every partition.

    Raises Corruption, AccessDenied, Unavailable.
    """
    states, named, numbers = {}, {}, {}
    for topology in topologies:
        there = store.states(topology.shards)
        for number, shard in enumerate(topology.shards):
            state = _last_sealed(store, there[shard]) if sealed else there[shard]
            # A member that has saved nothing yet may be about to. A retired one has no partitions.
            if state.layout is not None and len(state.ids):
                states[shard], numbers[shard] = state, number
                named[shard] = as_member(state.layout, number)
    if not states:
        return None
    return Predecessors(Parts(store, states, named=named), numbers, tuple(topologies))


def _last_sealed(store: Store, state: ShardState) -> ShardState:
    """Return the newest readable sealed state of a shard; an empty state without one."""
    for seal in reversed(state.sealed):
        with contextlib.suppress(Corruption):  # collected or damaged
            return store.state(state.shard, at=seal.seq)
    return ShardState(state.shard)


def overlapping(found: Predecessors, groups: Collection[Group], number: int) -> list[int]:
    """Return the shards with rows of these groups of member `number`: their members have to be fenced."""
    wanted = {name_among(group, number): group for group in groups}
    return [
        shard
        for shard, layout in found.parts.named.items()
        if any(
            one.name in wanted and (_common(wanted[one.name], one) or one.place is None)
            for one in layout.groups
        )
    ]


def _common(one: Group, other: Group) -> int:
    """Count the common rows of two parts of a tensor."""
    (start, stop), (first, last) = rows_of(one), rows_of(other)
    return max(0, min(stop, last) - max(start, first))


def _saved_rows(layout: Layout, g: int, saved: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the rows of group g, in the whole tensor, that have a copy. saved: bool of shape (partitions,)."""
    group = layout.groups[g]
    ids = np.arange(int(layout.base[g]), int(layout.base[g + 1]))
    if saved[ids].all():
        return [rows_of(group)]
    starts, stops = layout.row_ranges(ids[saved[ids]])
    first = group.first_row
    return list(zip((starts + first).tolist(), (stops + first).tolist(), strict=True))
