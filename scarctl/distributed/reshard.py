"""Take over a state that a previous set of ranks saved, or a single process. Each rank takes the rows that it owns."""

from __future__ import annotations

from dataclasses import replace

from scarctl.arena.arena import Arena
from scarctl.distributed.collectives import Team
from scarctl.distributed.own_extras import Own, with_own
from scarctl.distributed.owned_adapter import OwnedAdapter, group_of
from scarctl.distributed.ownership import Division
from scarctl.distributed.resume_step import MAX_APART, RankState, agree_on_step, perturbation_of
from scarctl.errors import NoIntactCopy, UsageError
from scarctl.recovery.label import NO_COMMIT
from scarctl.recovery.reshard import Parts, check_fits, with_slots
from scarctl.session.peers import AgreedState
from scarctl.state.extras import Extras
from scarctl.state.layout import Layout
from scarctl.state.torch_dtypes import torched
from scarctl.state.version import step_of
from scarctl.store import ShardState
from scarctl.theory.rework import Rework


class Moved:
    """See the module, and `scarctl.session.peers.Elsewhere`."""

    def __init__(
        self,
        parts: Parts,
        adapter: OwnedAdapter,
        division: Division,
        team: Team,
        rank_extras: frozenset[str] = frozenset(),
    ) -> None:
        """Compare the stored state with this model. rank_extras: names of extras that every rank saves itself.

        Raises LayoutMismatch if the model is another one.
        """
        self._parts = parts
        self._rank_extras = rank_extras
        self._adapter = adapter
        self._team = team
        if adapter.extras_per_rank:
            raise UsageError(
                "the optimizer's state differs between ranks, so it cannot be divided in another way",
                hint="start as many ranks as before, or use an optimizer whose state is sharded by FSDP",
            )
        groups = adapter.groups()
        names = {part.name for rank in division.owned for part in rank}
        check_fits(parts, [group_of(group) for group in groups], names, adapter.optimizer)
        adapter.learn_slots({name: group.tensors[1:] for name, group in parts.groups().items()})
        self.layout: Layout = parts.store.settings.layout(
            [(g.name, g.kind, with_slots(parts, group_of(g)), g.place) for g in groups],
            adapter.optimizer,
            adapter.elsewhere,
        )

    @property
    def seen(self) -> list[list[int]]:
        """Shards, and the newest record of each. All ranks have to see the same records."""
        return [[shard, state.seq] for shard, state in self._parts.states.items()]

    def fill(self, arena: Arena) -> AgreedState:
        """See `Elsewhere`."""
        self._parts.copy_into(arena.layout, arena.rows)
        standings, shards = self._standings()
        agreement = agree_on_step(standings)
        extras = self._extras(shards[agreement.reference])
        rank = self._team.rank
        # Random generators and extras with `per_rank` belong to one rank: a new rank keeps its current ones.
        mine = extras if rank == agreement.reference else None
        if mine is None and rank < len(shards):
            mine = self._extras(shards[rank])
        own = None if mine is None else Own.of(mine.state)
        if own is None or own.rng is None:  # another rank saved this part, without this rank's generators
            own = Own.of(self._adapter.capture())
        mixed = with_own(extras, own, self._rank_extras & own.objects.keys())
        label = self._parts.label if agreement.label.of_one else self._parts.label.because(NO_COMMIT)
        label = replace(label, caveats=_otherwise(self._parts.world, self._team.world))
        summary = {
            "world": self._team.world,
            "lost": list(agreement.lost),
            "steps": [standing.step for standing in standings],
            "step": agreement.step,
            "perturbation": perturbation_of(standings, agreement).to_json(),
            "rework": Rework(None, reason="the state was saved under another division").to_json(),
            "rollback_steps": None,
        }
        return AgreedState(agreement.step, mixed, label, summary)

    def _standings(self) -> tuple[list[RankState], list[int]]:
        """Return the standing and number of every shard with extras."""
        states = {s: state for s, state in self._parts.states.items() if state.extras is not None}
        if not states:
            raise NoIntactCopy(
                f"{self._parts.store.url} has no extras: the optimizer's step counts and the states of random "
                "generators were never saved"
            )
        steps = {shard: step_of(state.extras[0]) for shard, state in states.items() if state.extras}
        wholes = {shard: _whole(states[shard], step) for shard, step in steps.items()}
        owns = {shard: bool(len(state.ids)) for shard, state in states.items()}
        head = max((steps[shard] for shard in states if wholes[shard] and owns[shard]), default=-1)
        # Copies that survived in memory have been saved to the store since. Survivors were in the same iteration.
        survived = {shard: bool(wholes[shard]) and steps[shard] >= head - MAX_APART for shard in states}
        found = [RankState(steps[s], survived[s], owns=owns[s], whole=wholes[s]) for s in states]
        return found, list(states)

    def _extras(self, shard: int) -> Extras:
        found = self._parts.store.read_extras(self._parts.states[shard])
        assert found is not None, "only shards with extras are asked for"
        return Extras.from_tree(torched(found[1]))


def _whole(state: ShardState, step: int) -> str:
    """Return the commit with a shard's copies and extras, if all are of this step; "" without one."""
    same = state.extras_whole == state.whole and bool((step_of(state.version) == step).all())
    return state.whole if same else ""


def _otherwise(before: int, now: int) -> tuple[str, ...]:
    """Return why training on `now` ranks does not continue bit for bit what `before` ranks have saved; () if it may."""
    if before == now == 1:
        return ()
    if before == now:
        return (
            f"saved by {before} ranks that divided the state otherwise: their sums may have another order",
        )
    return (
        f"saved by {_ranks(before)} and continued by {_ranks(now)}: sums have another order, batches and random "
        "numbers are divided otherwise",
    )


def _ranks(count: int) -> str:
    return "one process" if count == 1 else f"{count} ranks"
