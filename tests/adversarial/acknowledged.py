"""Explore acknowledgements of peers: an owner that trains, two hosts with copies, hosts that are lost.

One run, two partitions; a version is a step. A round sends the state that memory had when it began: that it holds this
state is in `replicas`. What others can see is one step, which names its function of scarctl. The
owner asks (`Run.await_peers`), and is answered by one host ("next") or by both ("all"). What was answered must survive
the loss of as many hosts as the answer is good for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.adversarial.search import Broken, Result, search

Copies = tuple[int, int]
NOTHING: Copies = (0, 0)
PARTITIONS = (0, 1)


class Frame(NamedTuple):
    """`kind`: "batch" with one partition's copy, "mark", or "ack" of a round."""

    kind: str
    number: int
    partition: int = 0
    version: int = 0


class Link(NamedTuple):
    """A sender, its connection in both directions, and the replica at the other end."""

    begun: int = 0
    acknowledged: int = 0
    wanted: int = 0
    under_way: bool = False
    """A round has begun, and its mark is not sent yet."""
    state: int = 0
    """The step that the round sends."""
    left: tuple[int, ...] = ()
    """Partitions that the round has still to send."""
    sent: Copies = NOTHING
    wire: tuple[Frame, ...] = ()
    back: tuple[Frame, ...] = ()
    written: Copies = NOTHING
    """Copies for the coming mark."""
    copies: Copies = NOTHING
    """What recovery finds: the copies at the newest mark."""
    lost: bool = False


class World(NamedTuple):
    todo: tuple[str, ...]
    step: int = 0
    """The state in memory."""
    links: tuple[Link, Link] = (Link(), Link())
    asked: tuple[int, int] | None = None
    """Rounds whose acknowledgement the owner waits for."""
    promised: int = 0
    owner_lost: bool = False
    losses: int = 0
    """Number of hosts that may still be lost."""


@dataclass(frozen=True)
class Scenario:
    """`words` of the training process. `ack` as in the settings. `losses`: number of hosts that are lost, any of them
    and at any time.
    """

    name: str
    ack: str
    losses: int
    words: str


SHORT = (
    Scenario("next, and one host is lost", "next", 1, "train ask"),
    Scenario("all, and two hosts are lost", "all", 2, "train ask"),
)
LONG = (
    Scenario("a question in a round", "next", 1, "train train ask"),
    Scenario("next, twice", "next", 1, "train ask train ask"),
    Scenario("all, twice", "all", 2, "train ask train ask"),
)
WINDOW = Scenario("next, and two hosts are lost", "next", 2, "train ask")
"""What "next" does not promise: surviving the loss of both the owner and the host that has acknowledged."""
MUTANTS = {
    "a round that is under way answers": "a question in a round",
    "what is sent counts as acknowledged": "next, and one host is lost",
    "the first batch is acknowledged as the round": "next, and one host is lost",
    "one host answers for all": "all, and two hosts are lost",
    "a mark overtakes the copies": "next, and one host is lost",
}
"""Rules left out, and the scenario that shows the consequence."""


class Model:
    def __init__(self, scenario: Scenario, mutant: str = "") -> None:
        assert mutant in ("", *MUTANTS)
        self.scenario = scenario
        self.mutant = mutant

    def begin(self) -> World:
        return World(tuple(self.scenario.words.split()), losses=self.scenario.losses)

    def steps(self, world: World) -> Iterator[tuple[str, World]]:
        check(world)
        if not world.owner_lost:
            yield from self._owner(world)
            for n in PARTITIONS:
                if not world.links[n].lost:
                    yield from self._sender(world, n)
        for n in PARTITIONS:
            if not world.links[n].lost:
                yield from self._host(world, n)
        if world.losses:
            yield from self._lose(world)

    # -- the training process -----------------------------------------------------------------------------------

    def _owner(self, world: World) -> Iterator[tuple[str, World]]:
        if world.asked is not None:
            yield from self._answer(world, world.asked)
            return
        if not world.todo:
            return
        word, rest = world.todo[0], world.todo[1:]
        if word == "train":
            yield f"copies step {world.step + 1}", world._replace(step=world.step + 1, todo=rest)
        else:
            yield "asks", self._ask(world._replace(todo=rest))

    def _ask(self, world: World) -> World:
        """Model Sender.ask: the next round answers, also while one is in progress."""
        early = self.mutant == "a round that is under way answers"
        numbers = [link.begun + (not (early and link.begun > link.acknowledged)) for link in world.links]
        links = [
            link._replace(wanted=max(link.wanted, n)) for link, n in zip(world.links, numbers, strict=True)
        ]
        return world._replace(asked=(numbers[0], numbers[1]), links=(links[0], links[1]))

    def _answer(self, world: World, asked: tuple[int, int]) -> Iterator[tuple[str, World]]:
        """Model Run.await_peers, which may also give up, and then promises nothing."""
        have = sum(link.acknowledged >= n for link, n in zip(world.links, asked, strict=True))
        count = 2 if self.scenario.ack == "all" and self.mutant != "one host answers for all" else 1
        if have >= count:
            yield f"{have} have it", world._replace(asked=None, promised=world.step)
        yield "waits no longer", world._replace(asked=None)

    # -- a link ---------------------------------------------------------------------------------------------------

    def _sender(self, world: World, n: int) -> Iterator[tuple[str, World]]:
        """Model Sender._round and Follower.round."""
        link = world.links[n]
        if link.back:
            got = link.back[0]
            known = max(link.acknowledged, got.number)
            yield (
                f"{n} is acknowledged",
                _with(world, n, link._replace(acknowledged=known, back=link.back[1:])),
            )
        if link.under_way:
            yield from self._send(world, n, link)
            return
        due = link.wanted > link.acknowledged or min(link.sent) < world.step
        idle = link.begun == link.acknowledged or self.mutant == "what is sent counts as acknowledged"
        if due and idle:
            left = tuple(p for p in PARTITIONS if link.sent[p] != world.step)
            begun = link._replace(begun=link.begun + 1, under_way=True, state=world.step, left=left)
            yield f"{n} begins round {begun.begun}", _with(world, n, begun)

    def _send(self, world: World, n: int, link: Link) -> Iterator[tuple[str, World]]:
        mark = Frame("mark", link.begun)
        early = self.mutant == "a mark overtakes the copies" and not any(f.kind == "mark" for f in link.wire)
        if link.left and not (early and len(link.left) == 1):
            p, version = link.left[0], link.state
            wire = (*link.wire, Frame("batch", link.begun, p, version))
            sent = _put(link.sent, p, version)
            yield f"{n} sends {p}", _with(world, n, link._replace(left=link.left[1:], sent=sent, wire=wire))
            return
        done = link._replace(wire=(*link.wire, mark), under_way=False)
        if self.mutant == "what is sent counts as acknowledged":
            done = done._replace(acknowledged=link.begun)
        yield f"{n} sends its mark", _with(world, n, done)

    def _host(self, world: World, n: int) -> Iterator[tuple[str, World]]:
        """Model Host._write: sent frames arrive, even after their sender was lost."""
        link = world.links[n]
        if not link.wire:
            return
        frame, link = link.wire[0], link._replace(wire=link.wire[1:])
        if frame.kind == "batch":
            link = link._replace(written=_put(link.written, frame.partition, frame.version))
            if self.mutant == "the first batch is acknowledged as the round":
                link = link._replace(back=(*link.back, Frame("ack", frame.number)))
        else:
            link = link._replace(copies=link.written, back=(*link.back, Frame("ack", frame.number)))
        yield f"host {n} takes {frame.kind}", _with(world, n, link)

    def _lose(self, world: World) -> Iterator[tuple[str, World]]:
        left = world._replace(losses=world.losses - 1)
        if not world.owner_lost:
            # Frames that were not yet read may be lost with the link, or arrive.
            yield "the owner is lost", left._replace(owner_lost=True)
            cut = tuple(link._replace(wire=(), back=()) for link in world.links)
            yield "the owner is lost with its wire", left._replace(owner_lost=True, links=(cut[0], cut[1]))
        for n in PARTITIONS:
            if not world.links[n].lost:
                yield (
                    f"host {n} is lost",
                    _with(left, n, world.links[n]._replace(lost=True, wire=(), back=())),
                )


def _put(copies: Copies, p: int, version: int) -> Copies:
    return (version, copies[1]) if p == 0 else (copies[0], version)


def _with(world: World, n: int, link: Link) -> World:
    return world._replace(links=(link, world.links[1]) if n == 0 else (world.links[0], link))


def check(world: World) -> None:
    """Raise Broken if a job that starts now does not find every acknowledged copy."""
    if not world.owner_lost or not world.promised:
        return
    found = [min(link.copies) for link in world.links if not link.lost]
    if max(found, default=0) < world.promised:
        raise Broken(f"step {world.promised} was acknowledged, and the hosts that are left have {found}")


def explore(scenario: Scenario, mutant: str = "") -> Result:
    """Return the number of reachable states, or the shortest way to a broken one."""
    model = Model(scenario, mutant)
    return search(model.begin(), model.steps)
