"""Implement a session's questions for a member: one of several processes that share a store and nothing else.

Each member starts, dies and starts again alone, without a process group. It saves to its own shard, and its state is
whole without the others (`scarctl.store.members`). Other hosts that keep copies of its memory are found in the store
(`scarctl.distributed.meeting`). If another number of members has saved to the store, each takes over
the rows that are its own now (`scarctl.distributed.heir`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl.adapter import Adapter
from scarctl.config import Member, SessionSettings
from scarctl.daemon.saver import DaemonSaver
from scarctl.distributed.credentials import Credentials, check_files, credentials_of, require_secret
from scarctl.distributed.heir import Heir, end_earlier, groups_of
from scarctl.distributed.host_address import NO_COPY
from scarctl.distributed.leftover_arenas import save_own
from scarctl.distributed.meeting import Meeting
from scarctl.distributed.memory_search import search_memory
from scarctl.distributed.placed_adapter import PlacedAdapter
from scarctl.errors import UsageError
from scarctl.persist.saver import Saver
from scarctl.recovery.lost import Lost, find_lost, parse_lost, refuse_unmatched
from scarctl.recovery.members import predecessors
from scarctl.recovery.shares import as_member
from scarctl.session.peers import Together
from scarctl.state.caveats import Caveats
from scarctl.state.layout import Layout
from scarctl.store import Store, Topology
from scarctl.store.members import EPOCH, MAX_MEMBERS, earlier, join_members

_MOST_ROWS = 1 << 60


def member_of(member: object) -> Member:
    """Return the argument of `attach` as a checked `Member`. Raises UsageError."""
    if isinstance(member, tuple | list) and len(member) == 2:
        member = Member(*member)
    if not isinstance(member, Member) or not all(type(n) is int for n in (member.number, member.count)):
        raise UsageError(
            f"member is {member!r:.80}", hint="give this member's number and the count, such as (2, 8)"
        )
    number, count, replaces = member.number, member.count, member.replaces
    if not 1 <= count <= MAX_MEMBERS:
        raise UsageError(f"member is ({number}, {count}): there are 1 to {MAX_MEMBERS} members")
    if not 0 <= number < count:
        raise UsageError(
            f"member is ({number}, {count}): there is no member {number}",
            hint=f"{count} members have the numbers 0 to {count - 1}",
        )
    if replaces is not None and (type(replaces) is not int or not 1 <= replaces <= MAX_MEMBERS):
        raise UsageError(f"replaces is {replaces!r:.80}, not a number of members")
    if member.after is not None and (
        type(member.after) is not int or member.after < EPOCH or replaces is None
    ):
        raise UsageError(
            f"after is {member.after!r:.80}",
            hint="give with replaces= the epoch of the replaced members, which `scarctl inspect` shows",
        )
    if not _is_divided(member.divided):
        raise UsageError(
            f"divided is {member.divided!r:.80}",
            hint="give (first row, rows of the whole tensor) by the name of a tensor",
        )
    return member


def _is_divided(divided: object) -> bool:
    return isinstance(divided, Mapping) and all(
        isinstance(name, str)
        and isinstance(rows, tuple | list)
        and len(rows) == 2
        and all(type(n) is int and 0 <= n <= _MOST_ROWS for n in rows)
        for name, rows in divided.items()
    )


class Membership(Together):
    """Member `rank` of `count`: see the module, and `scarctl.session.peers.Together`."""

    def __init__(self, member: Member, adapter: Adapter, own_extras: frozenset[str] = frozenset()) -> None:
        """Prepare for a checked member. own_extras: names of extras that another member's state never replaces.

        Raises UsageError if a divided tensor does not fit the model.
        """
        super().__init__()
        self.rank, self.count = member.number, member.count
        self.adapter: Any = PlacedAdapter(adapter, member.divided) if member.divided else adapter
        """The adapter of the session: with the places of divided tensors."""
        self._replaces, self._after = member.replaces, member.after
        self._own_extras = own_extras
        self._settings: SessionSettings | None = None
        self._topology: Topology | None = None
        self._view: Store | None = None
        self._credentials: Credentials | None = None
        self._meeting: Meeting | None = None

    def open_store(self, settings: SessionSettings) -> Store:
        """See `Together`. Raises as `scarctl.store.members.join_members` does, and as `Predecessors.check` does."""
        if settings.shards not in (None, 1):
            raise UsageError(f"shards={settings.shards}: each member is one shard", hint="omit shards")
        require_secret(settings)
        check_files(settings)
        self._settings = settings
        store = Store.create(settings.store, **settings.fixed(), **settings.place())
        try:
            self._credentials = credentials_of(store, settings)
            self._topology = join_members(
                store,
                self.count,
                self._replaces,
                self._after,
                before=lambda before: self._prepare(store, before),
            )
            view = store.of_shard(self._topology.shards[self.rank], current=True)
            if self._credentials is not None:
                self.brought = search_memory([view], settings, self._credentials) > 0
        except BaseException:
            store.close()
            raise
        self._view = view
        return view

    def _prepare(self, store: Store, before: Topology) -> None:
        """Save earlier members' copies to the store, and check that this member can take over.

        Copies on this host are saved, and newer ones of hosts that can be asked. A replica here may be older than them.
        """
        assert self._settings is not None, "the store is being opened"
        settings = self._settings
        views = [store.of_shard(shard) for shard in before.shards]
        if self._credentials is not None:
            search_memory(views, settings, self._credentials)
        save_own(views, settings)
        found = predecessors(store, [before, *earlier(store, before)])
        if found is not None and found.saved:
            found.check(self.rank, self.count, groups_of(self.adapter), self.adapter.optimizer)
            found.check_complete()

    def keep_copies(self, saver: Saver, settings: SessionSettings, caveats: Caveats) -> None:
        """See `Together`. Other hosts are found in the store, by a thread: members start at any time."""
        if not settings.peers or self._credentials is None:
            return
        if not isinstance(saver, DaemonSaver):
            caveats.say("peers", f"{NO_COPY}: there is no daemon")
            return
        assert self._view is not None, "the store is open"
        self._meeting = Meeting(self._view, saver, settings, self._credentials, self.start, caveats)
        self._meeting.start()

    def end_copies(self) -> None:
        if self._meeting is not None:
            self._meeting.close()

    def holds_earlier_run(self, store: Store) -> bool:
        """See `Together`. Members that take over have to resume."""
        assert self._topology is not None, "the store is open"
        return super().holds_earlier_run(store) or self._topology.epoch > EPOCH

    def elsewhere(self, store: Store, mode: str, snapshot: str | None) -> Heir | None:
        """See `Together`. Returns the state of earlier members, which are fenced then.

        Raises UsageError for a snapshot, because it belongs to one of those members, and is in its shard.
        """
        assert self._settings is not None, "the store is open"
        assert self._topology is not None, "the store is open"
        if self._topology.epoch == EPOCH:
            return None
        if snapshot is not None:
            raise UsageError(
                f"these {self.count} members did not save snapshot {snapshot!r}",
                hint="`scarctl recover --snapshot` restores its tensors into a file; nothing was changed",
            )
        whole = store.again()
        sealed = mode == "rollback"
        found = end_earlier(whole, self._topology, self.rank, self.adapter, self._settings, sealed=sealed)
        if found is None or not found.saved:
            return None
        return Heir(found, self.adapter, self.rank, self.count, self._own_extras)

    def lost_ids(self, lost: Lost, layout: Layout, store: Store) -> NDArray[np.int64]:
        """See `Together`. Numbers are those of members. Names are this member's own, or as in the state of all."""
        assert self._topology is not None, "the store is open"
        names = [group.name for group in layout.groups]
        items = parse_lost(lost, names, self._topology.shards, self.count, noun="member")
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
