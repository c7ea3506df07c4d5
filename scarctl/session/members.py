"""Implement a session's questions for a member: one of several processes that share a store and nothing else.

Each member starts, dies and starts again alone, without a process group. It saves to its own shard, and its state is
whole without the others (`scarctl.store.members`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scarctl.config import SessionSettings
from scarctl.errors import UsageError
from scarctl.recovery.lost import Lost, find_lost, parse_lost, refuse_unmatched
from scarctl.recovery.shares import as_member
from scarctl.session.peers import Together, refuse_peers
from scarctl.state.layout import Layout
from scarctl.store import Store
from scarctl.store.members import MAX_MEMBERS, join_members


class Member(Together):
    """Member `rank` of `count`: see the module, and `scarctl.session.peers.Together`."""

    def __init__(self, member: object) -> None:
        """Take (number, count). Raises UsageError unless both are integers and the number is in 0..count - 1."""
        super().__init__()
        if not (
            isinstance(member, tuple | list) and len(member) == 2 and all(type(n) is int for n in member)
        ):
            raise UsageError(
                f"member is {member!r:.80}", hint="give this member's number and the count, such as (2, 8)"
            )
        number, count = member
        if not 1 <= count <= MAX_MEMBERS:
            raise UsageError(f"member is ({number}, {count}): there are 1 to {MAX_MEMBERS} members")
        if not 0 <= number < count:
            raise UsageError(
                f"member is ({number}, {count}): there is no member {number}",
                hint=f"{count} members have the numbers 0 to {count - 1}",
            )
        self.rank, self.count = number, count

    def open_store(self, settings: SessionSettings) -> Store:
        """See `Together`. Raises as `scarctl.store.members.join_members` does."""
        if settings.shards not in (None, 1):
            raise UsageError(f"shards={settings.shards}: each member is one shard", hint="leave shards out")
        refuse_peers(settings)
        store = Store.create(settings.store, **settings.fixed(), **settings.place())
        try:
            join_members(store, self.count)
        except BaseException:
            store.close()
            raise
        return store.of_shard(self.rank)

    def lost_ids(self, lost: Lost, layout: Layout, store: Store) -> NDArray[np.int64]:
        """See `Together`. Numbers are those of members. Names are this member's own, or as in the state of all."""
        names = [group.name for group in layout.groups]
        items = parse_lost(lost, names, range(self.count), self.count, noun="member")
        shard_of = store.shard_of(layout)
        ids, unmatched = find_lost(items, layout, shard_of, self.rank)
        others, foreign = find_lost(items, as_member(layout, self.rank), shard_of, self.rank)
        refuse_unmatched([unmatched, foreign], names)
        found = np.union1d(ids, others)
        if not found.size:
            raise UsageError(
                f"member {self.rank} has none of the lost parts", hint="ask the member that has lost them"
            )
        return found
