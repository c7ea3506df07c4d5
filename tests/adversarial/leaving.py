"""Evacuations as a transition system: a host that shuts down, a store that takes a part, a host with copies.

One run, two partitions; what a copy or extras hold is a number. What others can see is one step, which names its
function of scarctl. After a report that calls all safe the host is lost: the store and the other host must have the
newest copies, and the extras of their step. The other host may be lost before an evacuation begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.adversarial.search import Broken, Result, search


class Copy(NamedTuple):
    """`version`: the step. `content`: other bytes have another number, also at the same step."""

    version: int = 0
    content: int = 0


Copies = tuple[Copy, Copy]
NOTHING: Copies = (Copy(), Copy())
PARTITIONS = (0, 1)


class Frame(NamedTuple):
    """`kind`: "copy", "extras" (a hand-over), or "mark"; an answer has the kind of its frame."""

    kind: str
    number: int
    partition: int = 0
    copy: Copy = Copy()
    extras: int = 0


class Link(NamedTuple):
    """The sender, its wire in both directions, and the replica at the other end."""

    begun: int = 0
    acknowledged: int = 0
    """The newest round whose mark was answered."""
    round: tuple[Frame, ...] = ()
    """What the present round still sends."""
    sent: Copies = NOTHING
    known: Copies = NOTHING
    """Copies that were answered."""
    complete: bool = False
    vouched: bool = False
    """The other host has answered since the evacuation began."""
    wire: tuple[Frame, ...] = ()
    back: tuple[Frame, ...] = ()
    copies: Copies = NOTHING
    staged: int = 0
    extras: int = 0
    marked: bool = False
    """The replica has had a mark: recovery finds it."""
    lost: bool = False


class World(NamedTuple):
    todo: tuple[str, ...]
    made: int = 0
    """The newest number of a content."""
    copies: Copies = NOTHING
    extras: int = 0
    """The newest extras."""
    queued: int = 0
    """Extras in the hand-over that waits; 0: none waits."""
    store: Copies = NOTHING
    stored: int = 0
    """Extras in the store."""
    link: Link = Link()
    leaving: int = 0
    """The round that sends everything, in an evacuation; 0: none began."""
    losses: int = 0
    safe: bool = False
    gone: bool = False


@dataclass(frozen=True)
class Scenario:
    """`words` of the training process. `losses`: 1 if the other host may be lost before an evacuation."""

    name: str
    words: str
    losses: int = 0


SHORT = (
    Scenario("an evacuation", "train leave report"),
    Scenario("the other host is dead", "train leave report", losses=1),
    Scenario("a second evacuation", "train leave report leave report"),
    Scenario("other bytes of the same step", "train load leave report"),
    Scenario("a round is under way", "train train leave report"),
)
MUTANTS = {
    "a host counts that has not answered since": "the other host is dead",
    "a copy counts when it is sent": "a round is under way",
    "a copy counts by its version alone": "other bytes of the same step",
    "a replica counts before its mark": "an evacuation",
    "extras do not count": "an evacuation",
    "a hand-over goes without its extras": "a second evacuation",
    "the round under way answers": "a round is under way",
}
"""Rules left out, and the scenario that shows what happens then."""


class Model:
    def __init__(self, scenario: Scenario, mutant: str = "") -> None:
        assert mutant in ("", *MUTANTS)
        self.scenario = scenario
        self.mutant = mutant

    def begin(self) -> World:
        return World(tuple(self.scenario.words.split()), losses=self.scenario.losses)

    def steps(self, world: World) -> Iterator[tuple[str, World]]:
        check(world)
        if not world.gone:
            yield from self._owner(world)
            yield from self._saver(world)
            yield from self._sender(world)
        yield from self._host(world)
        if world.losses and not world.leaving:
            link = world.link._replace(lost=True, wire=(), back=(), round=())
            yield "the other host is lost", world._replace(losses=0, link=link)

    # -- the training process -----------------------------------------------------------------------------------

    def _owner(self, world: World) -> Iterator[tuple[str, World]]:
        if world.safe:
            cut = world.link._replace(wire=(), back=())
            yield "the host is lost", world._replace(gone=True, link=cut)
        if not world.todo:
            return
        word, world = world.todo[0], world._replace(todo=world.todo[1:], safe=False)
        if word == "leave":  # Departure.evacuate, after its flush; PeerCopies.hurry
            early = (
                self.mutant == "the round under way answers" and world.link.begun > world.link.acknowledged
            )
            number = world.link.begun + (not early)
            yield "leaves", world._replace(leaving=number, link=world.link._replace(vouched=False))
        elif word == "report":
            yield "reports", world._replace(safe=self._is_safe(world))
        else:
            made, version = world.made + 1, world.copies[0].version + (word == "train")
            copy = Copy(version, made)
            done = world._replace(made=made, copies=(copy, copy), extras=made, queued=made)
            yield f"{word}s {copy}", done

    def _is_safe(self, world: World) -> bool:
        """Evacuation.report."""
        link = world.link
        counts = (link.complete or self.mutant == "a replica counts before its mark") and (
            link.vouched or self.mutant == "a host counts that has not answered since"
        )
        there = link.sent if self.mutant == "a copy counts when it is sent" else link.known
        there = there if counts else NOTHING
        by_version = self.mutant == "a copy counts by its version alone"
        for p in PARTITIONS:
            copy = world.copies[p]
            same = there[p].version == copy.version if by_version else there[p] == copy
            if world.store[p] != copy and not same:
                return False
        all_there = counts and link.acknowledged >= world.leaving
        saved = world.queued in (0, world.stored)
        return all_there or saved or self.mutant == "extras do not count"

    def _saver(self, world: World) -> Iterator[tuple[str, World]]:
        """Evacuation._commit and _seal: copies with the extras, if both fit; the extras alone, if they fit then."""
        for p in PARTITIONS:
            if world.store[p] != world.copies[p]:
                saved = world._replace(store=_put(world.store, p, world.copies[p]))
                yield f"commits {p}", saved
                yield f"commits {p} with extras", saved._replace(stored=world.extras)
        if world.queued and world.store == world.copies:
            if world.stored == world.queued or self.mutant == "a hand-over goes without its extras":
                yield "removes the hand-over", world._replace(queued=0)
            else:
                yield "commits the extras", world._replace(stored=world.queued)

    # -- the link -------------------------------------------------------------------------------------------------

    def _sender(self, world: World) -> Iterator[tuple[str, World]]:
        """Sender._round and Follower.round."""
        link = world.link
        if link.back:
            got, rest = link.back[0], link._replace(back=link.back[1:], vouched=bool(world.leaving))
            if got.kind == "copy":
                rest = rest._replace(known=_put(link.known, got.partition, got.copy))
            elif got.kind == "mark":
                rest = rest._replace(acknowledged=got.number, complete=True)
            yield f"is answered {got.kind}", world._replace(link=rest)
        if link.round:
            frame, sent = link.round[0], link.sent
            if frame.kind == "copy":
                frame = frame._replace(copy=world.copies[frame.partition])
                sent = _put(sent, frame.partition, frame.copy)
            wire = link.wire if link.lost else (*link.wire, frame)
            yield (
                f"sends {frame.kind}",
                world._replace(link=link._replace(round=link.round[1:], sent=sent, wire=wire)),
            )
        elif link.begun == link.acknowledged and not link.lost:
            due = link.sent != world.copies or link.begun < world.leaving
            if due:
                yield f"begins round {link.begun + 1}", world._replace(link=self._round(world, link))

    def _round(self, world: World, link: Link) -> Link:
        """Begin a round. Its hand-overs come after the copies, and before the mark."""
        number = link.begun + 1
        frames = [Frame("copy", number, p) for p in PARTITIONS if link.sent[p] != world.copies[p]]
        frames += [Frame("extras", number, extras=world.queued)] if world.queued else []
        return link._replace(begun=number, round=(*frames, Frame("mark", number)))

    def _host(self, world: World) -> Iterator[tuple[str, World]]:
        """Host._write."""
        link = world.link
        if not link.wire or link.lost:
            return
        frame = link.wire[0]
        link = link._replace(wire=link.wire[1:], back=(*link.back, frame))
        if frame.kind == "copy":
            link = link._replace(copies=_put(link.copies, frame.partition, frame.copy))
        elif frame.kind == "extras":
            link = link._replace(staged=frame.extras)
        else:
            link = link._replace(marked=True, extras=link.staged or link.extras)
        yield f"the other host takes {frame.kind}", world._replace(link=link)


def _put(copies: Copies, p: int, copy: Copy) -> Copies:
    return (copy, copies[1]) if p == 0 else (copies[0], copy)


def check(world: World) -> None:
    """Raise Broken if a job that starts now does not find what was called safe."""
    if not world.gone:
        return
    link = world.link
    usable = link.marked and not link.lost
    for p in PARTITIONS:
        if world.copies[p] not in (world.store[p], *[link.copies[p]] * usable):
            raise Broken(f"partition {p} was called safe, and is nowhere")
    if world.extras not in (world.stored, *[link.extras] * usable):
        raise Broken(f"extras {world.extras} were called safe, and are nowhere")


def explore(scenario: Scenario, mutant: str = "") -> Result:
    """Return the number of reachable states, or the shortest way to a broken one."""
    model = Model(scenario, mutant)
    return search(model.begin(), model.steps)
