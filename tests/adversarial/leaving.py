"""Evacuations as a transition system: a host that shuts down, a store that takes a part, a host with copies.

One run, two partitions; memory has the state of the newest moment and the one before, each with its extras. What others
can see is one step, which names its function of scarctl. After a report that calls all safe the host is lost: the store
and the other host must have the newest copies, and the extras of their moment. The other host may be lost before an
evacuation begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.adversarial.search import Broken, Result, search


class Copy(NamedTuple):
    """`moment`: when these bytes were new; a step, `version`, can have two."""

    version: int = 0
    moment: int = 0


Copies = tuple[Copy, Copy]
NOTHING: Copies = (Copy(), Copy())
PARTITIONS = (0, 1)
WINDOW = 2
"""Most frames on the way, or answered and not read. The sender has four."""


class State(NamedTuple):
    """What a slot of memory has. Extras are named by their moment."""

    copies: Copies = NOTHING
    extras: int = 0


class Frame(NamedTuple):
    """`kind`: "copy", "extras", "part" (a mark after a copy) or "mark"; an answer has the kind of its frame."""

    kind: str
    number: int
    partition: int = 0
    copy: Copy = Copy()
    extras: int = 0
    copies: Copies = NOTHING
    """What the replica has after a mark."""
    newest: bool = False
    """The round has sent what was newest when it began."""


class Link(NamedTuple):
    """The sender, its wire in both directions, and the replica at the other end."""

    begun: int = 0
    ended: int = 0
    """The newest round that has ended, with an answer to its mark or because it lost its hold."""
    acknowledged: int = 0
    """The newest round whose mark was answered, and that sent what was newest."""
    state: State = State()
    """The state that the present round holds."""
    round: tuple[Frame, ...] = ()
    """What the present round still sends."""
    sent: Copies = NOTHING
    known: Copies = NOTHING
    """Copies that were there at the newest mark that was answered."""
    vouched: bool = False
    """The other host has answered since the evacuation began."""
    wire: tuple[Frame, ...] = ()
    back: tuple[Frame, ...] = ()
    copies: Copies = NOTHING
    written: Copies = NOTHING
    """Copies in the replica's other slot, for the coming mark."""
    staged: int = 0
    extras: int = 0
    lost: bool = False


class World(NamedTuple):
    todo: tuple[str, ...]
    state: State = State()
    """The newest state in memory."""
    held: State | None = None
    """The state that the saver holds."""
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
    Scenario("the saver holds an earlier state", "train hold train leave report"),
)
MUTANTS = {
    "a host counts that has not answered since": "the other host is dead",
    "a copy counts when it is sent": "a round is under way",
    "a copy counts by its version alone": "other bytes of the same step",
    "a copy counts before its mark": "an evacuation",
    "extras do not count": "an evacuation",
    "the round under way answers": "a round is under way",
    "an earlier state answers": "the saver holds an earlier state",
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
        link = world.link
        if word == "leave":  # Departure.evacuate, after its flush; PeerCopies.hurry
            early = self.mutant == "the round under way answers" and link.begun > link.ended
            number = link.begun + (not early)
            yield "leaves", world._replace(leaving=number, link=link._replace(vouched=False))
        elif word == "report":
            yield "reports", world._replace(safe=self._is_safe(world))
        elif word == "hold":  # Persister.persist, which joins the hold of a round
            yield "the saver holds", world._replace(held=link.state if link.round else world.state)
        else:
            yield f"{word}s", self._made(world, again=word == "load")

    def _made(self, world: World, *, again: bool) -> World:
        """Make a state, into the slot that is not current: if that is held, the hold ends. again: of the same step."""
        moment = world.state.extras + 1
        copy = Copy(world.state.copies[0].version + (not again), moment)
        link, held = world.link, world.held
        if link.round and link.state != world.state:
            link = link._replace(round=(), ended=link.begun)
        if held != world.state:
            held = None
        return world._replace(state=State((copy, copy), moment), held=held, link=link)

    def _is_safe(self, world: World) -> bool:
        """Evacuation.report."""
        link = world.link
        counts = link.vouched or self.mutant == "a host counts that has not answered since"
        there = link.sent if self.mutant == "a copy counts when it is sent" else link.known
        there = there if counts else NOTHING
        by_version = self.mutant == "a copy counts by its version alone"
        for p in PARTITIONS:
            copy = world.state.copies[p]
            same = there[p].version == copy.version if by_version else there[p] == copy
            if world.store[p] != copy and not same:
                return False
        all_there = counts and link.acknowledged >= world.leaving
        return all_there or world.stored == world.state.extras or self.mutant == "extras do not count"

    def _saver(self, world: World) -> Iterator[tuple[str, World]]:
        """Evacuation._commit and _seal: copies with the extras, if both fit; the extras alone, if they fit then."""
        if world.held is not None:
            yield "the saver lets go", world._replace(held=None)
            return
        copies, extras = world.state
        for p in PARTITIONS:
            if world.store[p] != copies[p]:
                saved = world._replace(store=_put(world.store, p, copies[p]))
                yield f"commits {p}", saved
                yield f"commits {p} with extras", saved._replace(stored=extras)
        if world.store == copies and world.stored != extras:
            yield "seals", world._replace(stored=extras)

    # -- the link -------------------------------------------------------------------------------------------------

    def _sender(self, world: World) -> Iterator[tuple[str, World]]:
        """Sender._round and Follower.round."""
        link = world.link
        if link.back:
            got, rest = link.back[0], link._replace(back=link.back[1:], vouched=bool(world.leaving))
            if got.kind in ("part", "mark"):
                rest = rest._replace(known=got.copies)
            elif got.kind == "copy" and self.mutant == "a copy counts before its mark":
                rest = rest._replace(known=_put(link.known, got.partition, got.copy))
            if got.kind == "mark":
                answers = got.newest or self.mutant == "an earlier state answers"
                acknowledged = got.number if answers else link.acknowledged
                rest = rest._replace(ended=got.number, acknowledged=acknowledged)
            yield f"is answered {got.kind}", world._replace(link=rest)
        if link.round and len(link.wire) + len(link.back) < WINDOW:
            frame, left, sent = link.round[0], link.round[1:], link.sent
            if frame.kind == "copy":
                sent = _put(sent, frame.partition, frame.copy)
                if world.leaving:
                    left = (Frame("part", frame.number, copies=sent), *left)
            elif frame.kind == "mark":
                frame = frame._replace(copies=sent)
            changed = link._replace(round=left, sent=sent, wire=(*link.wire, frame))
            yield f"sends {frame.kind}", world._replace(link=changed)
        elif not link.round and link.begun == link.ended and not link.lost:
            state = world.held or world.state
            asked = link.begun < world.leaving and state == world.state
            if link.sent != state.copies or asked:
                yield f"begins round {link.begun + 1}", world._replace(link=self._round(world, state))

    def _round(self, world: World, state: State) -> Link:
        """Begin a round, which holds `state`. Its extras come after the copies, and before the mark."""
        link = world.link
        number = link.begun + 1
        frames = [
            Frame("copy", number, p, state.copies[p]) for p in PARTITIONS if link.sent[p] != state.copies[p]
        ]
        frames.append(Frame("extras", number, extras=state.extras))
        mark = Frame("mark", number, newest=state == world.state)
        return link._replace(begun=number, state=state, round=(*frames, mark))

    def _host(self, world: World) -> Iterator[tuple[str, World]]:
        """Host._write. Copies count from their mark on: Replica._flip."""
        link = world.link
        if not link.wire or link.lost:
            return
        frame = link.wire[0]
        link = link._replace(wire=link.wire[1:], back=(*link.back, frame))
        if frame.kind == "copy":
            link = link._replace(written=_put(link.written, frame.partition, frame.copy))
        elif frame.kind == "extras":
            link = link._replace(staged=frame.extras)
        else:
            link = link._replace(copies=link.written, extras=link.staged)
        yield f"the other host takes {frame.kind}", world._replace(link=link)


def _put(copies: Copies, p: int, copy: Copy) -> Copies:
    return (copy, copies[1]) if p == 0 else (copies[0], copy)


def check(world: World) -> None:
    """Raise Broken if a job that starts now does not find what was called safe."""
    if not world.gone:
        return
    link = world.link
    for p in PARTITIONS:
        if world.state.copies[p] not in (world.store[p], *[link.copies[p]] * (not link.lost)):
            raise Broken(f"partition {p} was called safe, and is nowhere")
    if world.state.extras not in (world.stored, *[link.extras] * (not link.lost)):
        raise Broken(f"extras {world.state.extras} were called safe, and are nowhere")


def explore(scenario: Scenario, mutant: str = "") -> Result:
    """Return the number of reachable states, or the shortest way to a broken one."""
    model = Model(scenario, mutant)
    return search(model.begin(), model.steps)
