"""Explore what two ranks keep in memory together: two slots each, and a step to which both can go back at any moment.

Within a rank a slot is whole or not; `tests.adversarial.memory_model` has the rows. The rules:

1. A round fixes the step that both ranks copy, and gives it a moment: a number that no other copy ever gets. Training
   keeps the ranks within one step of each other.
2. A rank copies into the slot that is not current. When the last byte is there it says so; it also says when it left
   the moment out (a hold, a value that is not finite).
3. A moment that both have said to have is *agreed*. A rank that learns it flips: the current slot is the newest
   agreed moment that the rank knows of, and the other slot is free.
4. A rank that learns that the other one left the moment out does not flip, and its copy is free to be written over.
5. As long as a rank does not know which of the two it is, it writes into neither slot: the next moment is left out,
   and a flush goes to the target alone.
6. A restart of both takes the newest moment that is whole in both memories, whatever is current in each.

scarctl does 1, 2 and 6, and a rank flips by itself. So after copies that were left out a restart may find no moment in
both memories. It then says that the state is mixed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.adversarial.search import Broken, Result, search


class Word(NamedTuple):
    """What a rank says: the newest moment that it has copied or left out, and those that it has copied."""

    decided: int = 0
    whole: tuple[int, ...] = ()


class Rank(NamedTuple):
    step: int = 0
    at: str = "trains"
    """Or "copies", or "over"."""
    slots: tuple[int, int] = (100, 98)
    """The moments of what is whole: life, step, and whether it was a flush."""
    current: int = 0
    unknown: int = 0
    """A moment that this rank has copied, without knowing whether the other one has."""
    agreed: int = 100
    word: Word = Word(100, (100,))
    heard: Word = Word(100, (100,))


class World(NamedTuple):
    ranks: tuple[Rank, Rank] = (Rank(), Rank())
    life: int = 1
    faults: int = 0
    flushes: int = 0
    kills: int = 0


Step = tuple[str, World]


@dataclass(frozen=True)
class Scenario:
    """`faults`: copies that are left out; `flushes`: SIGTERMs; `kills`: both ranks are killed and start again."""

    name: str
    steps: int
    faults: int = 0
    flushes: int = 0
    kills: int = 0


SHORT = (
    Scenario("ranks that are killed", 3, kills=1),
    Scenario("ranks with a copy that is left out", 3, faults=1),
    Scenario("ranks that flush", 3, flushes=2),
    Scenario("ranks that lose a copy and are killed", 3, faults=1, kills=1),
    Scenario("ranks that are killed twice", 2, kills=2),
)
LONG = (
    Scenario("ranks, all of it", 4, faults=1, flushes=1, kills=1),
    Scenario("ranks, more of it", 4, faults=2, flushes=2, kills=2),
)
MUTANTS = {
    "a rank copies into the slot with the agreed step": "ranks that are killed",
    "a rank copies before it knows": "ranks that are killed",
    "a rank flushes before it knows": "ranks that flush",
    "a rank flips alone": "ranks with a copy that is left out",
    "a copy is told before its last byte": "ranks with a copy that is left out",
    "what one rank has is agreed": "ranks that are killed",
    "a restart believes the current slots": "ranks that are killed",
    "a restart compares steps": "ranks that are killed twice",
}
"""Rules left out, and the scenario that shows the consequence."""


class Model:
    def __init__(self, scenario: Scenario, mutant: str = "") -> None:
        self.scenario = scenario
        self.mutant = mutant

    def steps(self, world: World) -> Iterator[Step]:
        check(world)
        for r, rank in enumerate(world.ranks):
            other = world.ranks[1 - r]
            if rank.heard != other.word and rank.at != "over":
                yield f"rank {r} hears of the other", _with(world, r, self._hear(rank, other.word))
            if rank.at == "copies":
                yield f"rank {r} has copied", _with(world, r, self._copied(world, rank))
                if world.faults:
                    bad = rank._replace(
                        at="trains", word=rank.word._replace(decided=_moment(world, rank.step))
                    )
                    yield f"rank {r} abandons", _with(world._replace(faults=world.faults - 1), r, bad)
            elif rank.at == "trains":
                if rank.step < self.scenario.steps and other.step >= rank.step and other.at != "over":
                    yield from self._begin(world, r, rank._replace(step=rank.step + 1))
                if world.flushes:
                    yield self._flush(world._replace(flushes=world.flushes - 1), r, rank)
        if world.kills:
            yield "both are killed, and start again", self._restart(world)

    def _begin(self, world: World, r: int, rank: Rank) -> Iterator[Step]:
        moment = _moment(world, rank.step)
        left_out = rank._replace(word=rank.word._replace(decided=moment))
        if world.faults:
            yield f"rank {r} leaves out {moment}", _with(world._replace(faults=world.faults - 1), r, left_out)
        if self.mutant == "a rank flips alone":
            waits = rank.slots[1 - rank.current] == rank.agreed
        else:
            waits = bool(rank.unknown) and self.mutant != "a rank copies before it knows"
        if waits:
            if rank.heard.decided >= rank.word.decided:
                raise Broken(f"rank {r} knows all, and may write into neither slot")
            yield f"rank {r} does not know, and leaves out {moment}", _with(world, r, left_out)
            return
        s = (
            1 - rank.current
            if self.mutant != "a rank copies into the slot with the agreed step"
            else rank.current
        )
        copies = rank._replace(at="copies", slots=_put(rank.slots, s, 0), unknown=0)
        if self.mutant == "a copy is told before its last byte":
            copies = copies._replace(word=Word(moment, (*rank.word.whole, moment)))
        yield f"rank {r} copies {moment}", _with(world, r, copies)

    def _copied(self, world: World, rank: Rank) -> Rank:
        moment, s = _moment(world, rank.step), rank.slots.index(0)
        whole = rank.word.whole if moment in rank.word.whole else (*rank.word.whole, moment)
        rank = rank._replace(
            at="trains", slots=_put(rank.slots, s, moment), word=Word(moment, whole), unknown=moment
        )
        if self.mutant == "a rank flips alone":
            rank = rank._replace(current=s)
        return self._learn(rank)

    def _hear(self, rank: Rank, word: Word) -> Rank:
        return self._learn(rank._replace(heard=word))

    def _learn(self, rank: Rank) -> Rank:
        if not rank.unknown:
            return rank
        if rank.unknown in rank.heard.whole or self.mutant == "what one rank has is agreed":
            return rank._replace(current=rank.slots.index(rank.unknown), agreed=rank.unknown, unknown=0)
        return rank._replace(unknown=0) if rank.heard.decided >= rank.unknown else rank

    def _flush(self, world: World, r: int, rank: Rank) -> Step:
        """Model SIGTERM: the newest step goes into memory, too, if there is a slot for it; then the rank ends."""
        over = rank._replace(at="over")
        if rank.unknown and self.mutant != "a rank flushes before it knows":
            return f"rank {r} flushes to its target alone", _with(world, r, over)
        moment = _moment(world, rank.step) + 1
        word = Word(moment, (*rank.word.whole, moment))
        slots = _put(rank.slots, 1 - rank.current, moment)
        return f"rank {r} flushes {moment}", _with(world, r, over._replace(slots=slots, word=word))

    def _restart(self, world: World) -> World:
        first, second = (set(rank.slots) - {0} for rank in world.ranks)
        chosen = [max(first & second, default=0)] * 2
        if self.mutant == "a restart believes the current slots":
            chosen = [rank.slots[rank.current] for rank in world.ranks]
        elif self.mutant == "a restart compares steps":
            step = max({one % 100 for one in first} & {one % 100 for one in second}, default=0)
            chosen = [max(one for one in found if one % 100 == step) for found in (first, second)]
        if chosen[0] != chosen[1]:
            raise Broken(f"the ranks start from different moments: {chosen}")
        ranks = []
        for rank in world.ranks:
            word, current = Word(chosen[0], (chosen[0],)), rank.slots.index(chosen[0])
            step = chosen[0] % 100 // 2
            ranks.append(Rank(step, "trains", rank.slots, current, 0, chosen[0], word, word))
        return world._replace(ranks=(ranks[0], ranks[1]), life=world.life + 1, kills=world.kills - 1)


def check(world: World) -> None:
    """Raise Broken unless both memories have the newest moment that a rank calls agreed, or a newer one."""
    common = (set(world.ranks[0].slots) & set(world.ranks[1].slots)) - {0}
    agreed = max(rank.agreed for rank in world.ranks)
    if not common:
        raise Broken(f"there is no moment that both memories have: {[rank.slots for rank in world.ranks]}")
    if max(common) < agreed:
        raise Broken(f"moment {agreed} is agreed, and both memories have only {max(common)}")


def _moment(world: World, step: int) -> int:
    return world.life * 100 + step * 2


def _with(world: World, r: int, rank: Rank) -> World:
    return world._replace(ranks=(rank, world.ranks[1]) if r == 0 else (world.ranks[0], rank))


def _put(slots: tuple[int, int], s: int, moment: int) -> tuple[int, int]:
    return (moment, slots[1]) if s == 0 else (slots[0], moment)


def explore(scenario: Scenario, mutant: str = "") -> Result:
    """Return the number of reachable states, or the shortest way to a broken one."""
    model = Model(scenario, mutant)
    world = World(faults=scenario.faults, flushes=scenario.flushes, kills=scenario.kills)
    return search(world, model.steps)
