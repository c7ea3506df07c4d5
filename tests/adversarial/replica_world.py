"""Describe arenas, lives and the link in the model of replicas, and the conditions that hold at every moment."""

from __future__ import annotations

from typing import NamedTuple

from tests.adversarial.search import Broken

Version = tuple[int, int]
NONE: Version = (0, 0)
MIXED: Version = (-1, -1)
ALL = (0, 1)
Copies = tuple[Version, Version]
NOTHING: Copies = (NONE, NONE)


class Slot(NamedTuple):
    """The state `head`, with the version of each partition's copy: NONE without one, and while it is written."""

    head: Version = NONE
    copies: Copies = NOTHING


class Arena(NamedTuple):
    """Two slots. `seen`: the highest epoch. `owned`: a replica's epoch, or 0."""

    seen: int = 0
    slot: Slot = Slot()
    """The current one."""
    spare: Slot = Slot()
    torn: frozenset[int] = frozenset()
    """Partitions of the spare slot whose bytes are of two copies."""
    owned: int = 0
    complete: bool = True


class Frame(NamedTuple):
    kind: str
    epoch: int
    ids: tuple[int, ...] = ()
    version: Version = NONE
    torn: bool = False
    answers: bool = False
    """The round began after the question that a flush asks, with the newest state."""


class Life(NamedTuple):
    """A training process with its daemon. `after`: the life that must have ended before."""

    host: str
    todo: tuple[str, ...]
    after: int = -1
    at: str = ""
    epoch: int = 0
    step: int = 0
    found: Copies = NOTHING
    source: str = ""


class Link(NamedTuple):
    """The sender of life 0, and frames on the way to host b."""

    up: bool = True
    open: bool = False
    has: Copies = NOTHING
    held: str = ""
    """The slot that the sender holds in its round, "current" or "spare"; "lost" if the hold has ended."""
    round: Frame | None = None
    """The mark that will end the present round, read when the round begins."""
    marked: Version = NONE
    answered: bool = False
    """The peer has a round that answers the present question."""
    wire: tuple[Frame, ...] = ()
    staged: Frame | None = None
    """A batch that the peer is copying."""
    written: frozenset[int] = frozenset()
    """Partitions in the replica's spare slot that belong to the coming mark."""


class Loan(NamedTuple):
    """An arena that life `life` is fetching."""

    life: int
    source: str
    arena: Arena
    """Its header, with the copies that have arrived."""
    rows: int = 0
    """Number of partitions that have arrived."""


class World(NamedTuple):
    epoch: int = 0
    records: int = 0
    """Number of records in the shard's log, epochs and commits. Each is created exclusively."""
    committed: int = 0
    """The epoch of the newest commit."""
    durable: Copies = NOTHING
    bases: tuple[tuple[int, Version], ...] = ()
    """For each epoch the newest version that it continued: its predecessors' later versions are abandoned."""
    hosts: tuple[tuple[str, Arena], ...] = ()
    lost: frozenset[str] = frozenset()
    lives: tuple[Life, ...] = ()
    link: Link = Link()
    saving: str = ""
    """The slot that the saver of life 0 holds, as in `Link.held`."""
    loan: Loan | None = None
    asked: Copies = NOTHING
    """What memory had when a flush asked its peer."""
    promised: Copies = NOTHING
    """What a flush has reported to be on the other host."""
    states: frozenset[tuple[int, Slot]] = frozenset()
    """Every state that a memory has had, with its epoch."""
    fate: tuple[str, ...] = ()
    """Other events, in this order, at any time."""


Step = tuple[str, World]


def comes(world: World, host: str) -> bool:
    return any(life.host == host and not life.epoch and life.at != "over" for life in world.lives)


def arena_of(world: World, host: str) -> Arena:
    return dict(world.hosts).get(host, Arena())


def lives_on(world: World, host: str) -> bool:
    """Return whether the process lives whose arena a host has, perhaps cut off from all others."""
    seen = arena_of(world, host).seen
    return any(
        life.host == host and life.epoch == seen and life.at != "over" for life in world.lives if life.epoch
    )


def with_arena(world: World, host: str, arena: Arena) -> World:
    return world._replace(hosts=tuple(sorted({**dict(world.hosts), host: arena}.items())))


def with_state(world: World, host: str, arena: Arena) -> World:
    """Return the world with an arena that has a new state."""
    made = with_arena(world, host, arena)
    return made._replace(states=made.states | {(arena.seen, arena.slot)})


def with_life(world: World, i: int, life: Life) -> World:
    return world._replace(lives=(*world.lives[:i], life, *world.lives[i + 1 :]))


def put(copies: Copies, ids: tuple[int, ...], version: Version) -> Copies:
    return (version if 0 in ids else copies[0], version if 1 in ids else copies[1])


def check(world: World, following: list[Step]) -> None:
    """Raise Broken unless all conditions hold."""
    for name, arena in world.hosts:
        if MIXED in arena.slot.copies:
            raise Broken(f"host {name} has a torn copy that counts")
        if arena.complete and arena.slot.head > NONE and (arena.seen, arena.slot) not in world.states:
            raise Broken(f"host {name} has no state that was: {arena.slot.copies} as {arena.slot.head}")
    for i, life in enumerate(world.lives):
        if (
            life.host in world.lost
            or not life.epoch
            or life.at not in ("", "parted")
            or life.todo[:1] != ("train",)
        ):
            continue
        if not any(what in (f"{i} copies", f"{i} leaves a copy out") for what, _ in following):
            raise Broken(f"{i} waits for its peer before it trains")
        own = dict(world.hosts).get(life.host, Arena())
        if life.epoch == world.epoch and own.seen < life.epoch:
            raise Broken(f"the arena of {i} was overwritten")
