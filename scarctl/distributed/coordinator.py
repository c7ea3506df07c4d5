"""Coordinate the sessions of all ranks: the owner of each row, the shard of each rank, the step of a resume.

The session of a rank is an ordinary one. It sees only the rows that its rank owns, and only its own shard of the store.
`RankCoordinator` makes both views, and answers a session's questions to the other ranks (`scarctl.session.peers`).
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from scarctl.adapter import Adapter, StateGroup, ranks_may_differ
from scarctl.arena.arena import Arena
from scarctl.checkpoint.selector import Selector
from scarctl.config import SessionSettings
from scarctl.daemon.request import Request
from scarctl.distributed.alike import check_alike, settings_of
from scarctl.distributed.collectives import Team
from scarctl.distributed.common import Common
from scarctl.distributed.common_state import agree_in_memory
from scarctl.distributed.copies import keep_copies
from scarctl.distributed.credentials import Credentials, agreed_credentials, check_files, identity_of
from scarctl.distributed.digests import Digests
from scarctl.distributed.host_address import place_of
from scarctl.distributed.host_memory import bring_leftovers, bring_memory
from scarctl.distributed.last_step import another_is_ahead
from scarctl.distributed.leftover_arenas import fence, save_leftovers
from scarctl.distributed.own_extras import Own, completed, with_own
from scarctl.distributed.owned_adapter import OwnedAdapter, broadcast_over, holdings_of, slots_of, spread
from scarctl.distributed.ownership import Division, Holding, digest_of, divide
from scarctl.distributed.presence import Presence
from scarctl.distributed.rescue import Rescue
from scarctl.distributed.reshard import Moved
from scarctl.distributed.resume_step import (
    Agreement,
    RankState,
    agree_on_step,
    perturbation_of,
    rework_of_ranks,
)
from scarctl.distributed.rounds import Exchange
from scarctl.distributed.selector import GlobalSelector
from scarctl.errors import Unavailable, UsageError
from scarctl.persist.saver import Saver
from scarctl.recovery.lost import Lost, find_lost, parse_lost, refuse_unmatched, without_match_anywhere
from scarctl.recovery.reshard import find_parts
from scarctl.session.peers import AgreedState, Found, Together
from scarctl.state.caveats import Caveats
from scarctl.state.extras import Extras
from scarctl.state.layout import Layout
from scarctl.state.torch_dtypes import plain, torched
from scarctl.store import (
    Store,
    Topology,
    complete_sets,
    create_topology,
    newest_topology,
    read_snapshot,
    topology_epochs,
)
from scarctl.store.topology import refuse_members
from scarctl.theory.history import History
from scarctl.theory.rework import Outlook

T = TypeVar("T")
log = logging.getLogger("scarctl")


class RankCoordinator(Together):
    """See the module. Made by `join`, on all ranks."""

    def __init__(
        self,
        adapter: Adapter,
        groups: list[StateGroup],
        division: Division,
        team: Team,
        settings: SessionSettings,
        rank_extras: frozenset[str],
    ) -> None:
        """Take the division of the adapter's present `groups`."""
        self._rank_extras = rank_extras
        self._settings = settings
        self.team = team
        self.division = division
        self.adapter = OwnedAdapter(adapter, division, team.rank, groups)
        """The part of the state that this rank owns."""
        self.shards: tuple[int, ...] = ()
        """Shard of every rank, once the store is open."""
        self.rank, self.start = team.rank, ""
        self._digest = digest_of(division)
        self._digests = Digests(division, team.rank)
        self._parameters: list[torch.Tensor] | None = None
        self._number = 0
        self._exchange_group = team.subgroup() if team.world > 1 else None
        self._earlier = self._begun = False
        self._credentials: Credentials | None = None
        self._shard_view: Store | None = None
        self._presence: Presence | None = None
        self._whole = adapter

    @classmethod
    def join(
        cls,
        adapter: Adapter,
        settings: SessionSettings,
        team: Team,
        rank_extras: frozenset[str] = frozenset(),
    ) -> RankCoordinator:
        """Agree with the other ranks on the owner of every row.

        rank_extras: names of extras that every rank saves itself.
        Raises UsageError on every rank if settings, versions or models differ between ranks.
        """
        groups: list[StateGroup] = []

        def mine() -> tuple[dict[str, str], list[Any]]:
            groups.extend(adapter.groups())
            return settings_of(settings), [held.to_json() for held in holdings_of(groups)]

        everyone = team.collect(mine)
        # All ranks have the same values, so all get the same result, or the same error.
        check_alike([given for given, _ in everyone])
        if settings.shards not in (None, 1):
            raise UsageError(
                f"shards={settings.shards}: with several ranks, each rank is one shard", hint="omit shards"
            )
        division = divide([[Holding.from_json(obj) for obj in held] for _, held in everyone])
        return cls(adapter, groups, division, team, settings, rank_extras)

    # -- the store ----------------------------------------------------------------------------------------------

    def open_store(self, settings: SessionSettings) -> Store:
        """See `Together`. Rank 0 makes the store, and assigns a shard to every rank."""

        def make() -> Store:
            return Store.create(settings.store, **settings.fixed(), **settings.place())

        def make_first() -> Store | None:
            check_files(settings)
            return make() if self.team.rank == 0 else None

        store = self.agree(make_first, _close)
        with contextlib.ExitStack() as undo:

            def look() -> list[Any]:
                nonlocal store
                store = store or make()
                undo.callback(store.close)
                refuse_members(store)
                identity = identity_of(store, settings)
                return [store.id, self._is_divided_otherwise(store), place_of(settings), identity]

            found = self.team.collect(look)
            assert store is not None
            self._shard_view = self._view(store, settings, found)
            undo.pop_all()
        return self._shard_view

    def _view(self, store: Store, settings: SessionSettings, found: list[Any]) -> Store:
        """Return the view of the store with this rank's shard, once all ranks have received their shards.

        found: by rank, the store's id, whether it is divided otherwise, the place of the rank's arenas, and `Identity`.
        """
        ids, otherwise, places, identities = zip(*found, strict=True)
        if len(set(ids)) > 1:
            raise UsageError(
                f"{store.url} is not the same store on all ranks", hint="put it where every host can reach it"
            )
        self._credentials = agreed_credentials(store, settings, identities)
        if any(otherwise):
            self.moved = True
            bring_leftovers(store, settings, self.team, places, self._credentials)
            save_leftovers(store, settings, self.team)
            self.agree(lambda: fence(store) if self.team.rank == 0 else None)
        decided = self.team.collect(lambda: self._decide(store) if self.team.rank == 0 else None)[0]
        assert decided is not None, "rank 0 has decided"
        self._number, shards, self._earlier, self.start = decided
        self.shards = tuple(shards)
        if self._earlier and not self.moved and not self.division.apart:
            self.adapter.learn_slots(self.agree(lambda: slots_of(self._layouts(store))))
        if not self.moved:
            self.brought = bring_memory(store, settings, self.team, self.shards, places, self._credentials)
        return store.of_shard(self.shards[self.team.rank])

    def _is_divided_otherwise(self, store: Store) -> bool:
        newest = newest_topology(store)
        return bool(store.shards()) if newest is None else newest.division != self._digest

    def _decide(self, store: Store) -> tuple[int, list[int], bool, str]:
        """Choose the number of this start, and the shards by rank.

        Also return whether the store holds an earlier run, and this start's name.
        """
        newest, epochs, used = newest_topology(store), topology_epochs(store), store.shards()
        records = [store.log(shard).newest() for shard in used]
        number = 1 + max(epochs, default=0)
        # A topology without records belongs to a job that died before it saved.
        earlier = any(records)
        if newest is not None and newest.division == self._digest:
            return number, list(newest.shards), earlier, uuid.uuid4().hex
        first = 1 + max([*used, *(newest.shards if newest else ())], default=-1)
        return number, list(range(first, first + self.team.world)), earlier, uuid.uuid4().hex

    def _layouts(self, store: Store) -> list[Layout]:
        newest = [store.log(shard).newest() for shard in self.shards]
        return [store.layout(record.layout) for record in newest if record is not None]

    def writes(self) -> int:
        """See `Together`. Counts all parameters, not only owned ones, so that all ranks count the same."""
        if self._parameters is None:
            groups = self._whole.groups()
            self._parameters = [group.tensors[""] for group in groups if group.kind == "parameter"]
        return sum(parameter._version for parameter in self._parameters)

    def common(self) -> Callable[[], Mapping[str, str]]:
        return self._digests.of(self.adapter.known or self._whole.groups())

    def selector(self) -> Selector:
        rank, world = self.team.rank, self.team.world
        if self._exchange_group is None:
            return super().selector()

        def known() -> Sequence[StateGroup]:
            return () if ranks_may_differ(self.adapter.whole) else self.adapter.known

        common = Common(self.division, rank, known)
        exchange = Exchange(self._exchange_group, rank, world)
        return GlobalSelector(exchange, self.shards[rank], sample=common.sample, turns=common.turns)

    def keep_copies(self, saver: Saver, settings: SessionSettings, caveats: Caveats) -> None:
        if not settings.peers:
            return
        assert self._shard_view is not None, "the store is open"
        self._presence = keep_copies(
            self._shard_view, saver, settings, self.team, self.start, self._credentials, caveats
        )
        if self._presence is not None:
            self._presence.start()

    def end_copies(self) -> None:
        if self._presence is not None:
            self._presence.close()

    def begin(self, store: Store) -> None:
        """See `Together`. The topology is written before the first record of this start."""
        if self._begun:
            return
        topology = Topology(self._number, self.shards, self._digest)
        self.agree(lambda: create_topology(store, topology) if self.team.rank == 0 else None)
        self._begun = True

    def holds_earlier_run(self, store: Store) -> bool:
        return self._earlier

    # -- resuming -----------------------------------------------------------------------------------------------

    def agree(self, call: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        return self.team.agree(call, undo)

    def collect(self, call: Callable[[], object]) -> list[Any]:
        return self.team.collect(call)

    @property
    def several(self) -> bool:
        return self.team.world > 1

    def gather(self, value: object) -> list[Any]:
        return self.team.gather(value)

    def agree_in_memory(self, arena: Arena) -> None:
        agree_in_memory(arena, self.team)

    def agree_on_state(self, found: Found | None, store: Store) -> AgreedState | None:
        mine = None
        if found is not None:
            standing = RankState(
                found.step, found.survived, found.distance, found.owns, found.whole, found.head
            )
            mine = standing.to_list()
        gathered = self.team.gather(mine)
        if found is None or any(other is None for other in gathered):
            return None
        everyone = [RankState(*other) for other in gathered]
        agreement = agree_on_step(everyone)
        leads = self.team.rank == agreement.reference
        extras = found.extras
        theirs = None
        if any(other.step != agreement.step for other in everyone):
            tree = None if extras is None else extras.to_tree()
            theirs = self.team.from_rank(agreement.reference, plain(tree) if leads else None)
        if extras is None or found.step != agreement.step:
            own = extras or Extras(self.adapter.capture())
            extras = self._mixed(Extras.from_tree(torched(theirs)), own)
        extras = self.completed(extras)
        stored = History() if found.extras is None else History.from_array(found.extras.notes.points)
        points = stored.until(agreement.step).points
        measures = any(group.kind == "parameter" for group in self.adapter.groups())
        moved = self.team.gather([list(point) for point in points] if measures else None)
        outlook = _outlook(agreement.step, [points for points in moved if points is not None])
        summary = self._summary(agreement, everyone, store, outlook)
        return AgreedState(agreement.step, extras, agreement.label, summary)

    def completed(self, extras: Extras) -> Extras:
        own = Own.of(extras.state)
        if own.rng is not None and not self._rank_extras - own.objects.keys():
            return extras
        return completed(extras, Own.of(self.adapter.capture()), self._rank_extras)

    def _mixed(self, theirs: Extras, own: Extras) -> Extras:
        """Return another rank's extras of the common step, with the parts that every rank saves itself from `own`."""
        state = self.adapter.mix(theirs.state, own.state)
        mixed = with_own(replace(theirs, state=state), Own.of(own.state), self._rank_extras)
        return replace(mixed, notes=theirs.notes.of_part(own.notes))

    def _summary(
        self, agreement: Agreement, everyone: list[RankState], store: Store, outlook: Outlook
    ) -> dict[str, Any]:
        summary = None
        if self.team.rank == 0:
            sealed = next(iter(complete_sets(store.again())), None)
            back = None if sealed is None else max(0, agreement.step - sealed.step)
            rework = rework_of_ranks(everyone, agreement, outlook, comparable=self._settings.norm == "l2")
            summary = {
                "world": self.team.world,
                "lost": list(agreement.lost),
                "steps": [standing.step for standing in everyone],
                "step": agreement.step,
                "perturbation": perturbation_of(everyone, agreement).to_json(),
                "rework": rework.to_json(),
                "rollback_steps": back,
            }
        found: dict[str, Any] = self.team.from_rank(0, summary)
        return found

    def elsewhere(self, store: Store, mode: str, snapshot: str | None) -> Moved | None:
        def find() -> Moved | None:
            whole = store.again()
            name = None if snapshot is None else read_snapshot(whole, snapshot)
            parts = find_parts(whole, but=self.shards, sealed=mode == "rollback", snapshot=name)
            if parts is None:
                return None
            return Moved(parts, self.adapter, self.division, self.team, self._rank_extras)

        found = self.agree(find)
        everyone = self.team.gather(None if found is None else found.seen)
        if any(seen != everyone[0] for seen in everyone):
            raise Unavailable(
                f"{store.url}: copies that an earlier run left in memory are still being saved, and ranks have seen "
                "different states of the store",
                hint="retry after some time; nothing was changed",
                kind="store-changes",
            )
        return found

    def lost_ids(self, lost: Lost, layout: Layout, store: Store) -> NDArray[np.int64]:
        """See `Together`. Raises UsageError for a name that no rank has. Another rank's name is valid."""
        names = self._names()
        items = self.agree(lambda: parse_lost(lost, names, self.shards, self.team.world))
        ids, unmatched = find_lost(items, layout, store.shard_of(layout), self.team.rank)
        refuse_unmatched(self.team.gather(unmatched), names)
        return ids

    def own_ids(self, lost: Lost, layout: Layout, store: Store) -> NDArray[np.int64]:
        """See `Together`. Raises UsageError for a name that no rank has, and for rows beyond the last of a tensor here.

        Other rows are not compared with other ranks'.
        """
        names = self._names()
        items = parse_lost(lost, names, self.shards, self.team.world)
        ids, unmatched = find_lost(items, layout, store.shard_of(layout), self.team.rank)
        refuse_unmatched([without_match_anywhere(unmatched, layout, names)], names)
        return ids

    def _names(self) -> dict[str, None]:
        return dict.fromkeys(part.name for owned in self.division.owned for part in owned)

    def spread(self) -> None:
        if self.division.copies:
            groups, broadcast = self._whole.groups(), broadcast_over(self.team.group)
            self.team.collectively(lambda: spread(self.division, self.team.rank, groups, broadcast))

    def grant(self, requests: deque[Request], selector: Selector, *, regular: bool) -> Request | None:
        """See `Together`. Ranks learn of a request in the rounds of their regular checkpoints."""
        selector.request = self.team.rank + 1 if requests else 0
        agreed = selector.agreed() if regular else 0
        if not agreed:
            return None
        # A rank announces a request in every round until it is granted, so this may be a repetition.
        mine = requests.popleft().to_json() if requests and self.team.rank == agreed - 1 else None
        request = self.team.from_rank(agreed - 1, mine)
        if request is None:
            return None
        # Only the rank that had the request replies to it.
        return Request.from_json(request if mine else {**request, "number": 0})

    def behind(self, store: Store, step: int) -> bool:
        others = [shard for rank, shard in enumerate(self.shards) if rank != self.team.rank]
        return another_is_ahead(store, self._settings, others, step)

    def rescue(self, store: Store, step: int, extras: Callable[[], Extras], whole: str) -> None:
        rescue = Rescue(self.division, self.team.rank, self.shards, self._rank_extras)
        if rescue.possible:
            rescue.run(store, self._settings, self._whole.groups(), step, extras(), whole)

    def close(self) -> None:
        self.team.close()


def _outlook(step: int, parts: list[list[list[Any]]]) -> Outlook:
    """Return the outlook from the histories of all ranks that own rows. parts: the points of each."""
    histories = [History(tuple(point) for point in points) for points in parts]
    return Outlook.of(step, histories)


def _close(store: Store | None) -> None:
    if store is not None:
        store.close()
