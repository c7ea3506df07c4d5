"""Describe arenas, lives and the link in the model of replicas, and the conditions that hold at every moment."""

from __future__ import annotations

from typing import NamedTuple

from tests.adversarial.search import Broken

Version = tuple[int, int]
NONE: Version = (0, 0)
MIXED: Version = (-1, -1)
ALL = (0, 1)


class Arena(NamedTuple):
    """`odd`: partitions that are being written. `seen`: the highest epoch. `owned`: a replica's epoch, or 0."""

    seen: int = 0
    copies: tuple[Version, Version] = (NONE, NONE)
    odd: frozenset[int] = frozenset()
    handovers: frozenset[Version] = frozenset()
    head: Version = NONE
    owned: int = 0
    complete: bool = True


class Frame(NamedTuple):
    kind: str
    epoch: int
    ids: tuple[int, ...] = ()
    version: Version = NONE
    handovers: frozenset[Version] = frozenset()


class Life(NamedTuple):
    """A training process with its daemon. `after`: the life that must have ended before."""

    host: str
    todo: tuple[str, ...]
    after: int = -1
    at: str = ""
    epoch: int = 0
    step: int = 0
    found: tuple[Version, Version] = (NONE, NONE)
    source: str = ""


class Link(NamedTuple):
    """The sender of life 0, and frames on the way to host b."""

    up: bool = True
    open: bool = False
    has: tuple[Version, Version] = (NONE, NONE)
    round: Frame | None = None
    """The mark that will end the present round, read when the round begins."""
    marked: Version = NONE
    wire: tuple[Frame, ...] = ()
    staged: Frame | None = None
    """A batch that the peer is copying."""


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
    durable: tuple[Version, Version] = (NONE, NONE)
    bases: tuple[tuple[int, Version], ...] = ()
    """For each epoch the newest version that it continued: its predecessors' later versions are abandoned."""
    hosts: tuple[tuple[str, Arena], ...] = ()
    lost: frozenset[str] = frozenset()
    lives: tuple[Life, ...] = ()
    link: Link = Link()
    loan: Loan | None = None
    promised: Version = NONE
    """The version that a flush has reported to be on the other host."""
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


def with_life(world: World, i: int, life: Life) -> World:
    return world._replace(lives=(*world.lives[:i], life, *world.lives[i + 1 :]))


def put(copies: tuple[Version, Version], ids: tuple[int, ...], version: Version) -> tuple[Version, Version]:
    return (version if 0 in ids else copies[0], version if 1 in ids else copies[1])


def check(world: World, following: list[Step]) -> None:
    """Raise Broken unless all conditions hold."""
    for name, arena in world.hosts:
        if any(arena.copies[p] == MIXED and p not in arena.odd for p in ALL) and world.link.staged is None:
            raise Broken(f"host {name} has a torn copy that counts")
        if arena.complete and any(
            p not in arena.odd and arena.copies[p] < version for version in arena.handovers for p in ALL
        ):
            raise Broken(f"host {name} has a hand-over before its rows: {arena.copies}")
        if arena.owned and any(p not in arena.odd and arena.copies[p][0] > arena.owned for p in ALL):
            raise Broken(f"epoch {arena.owned} has written over a later one")
    for i, life in enumerate(world.lives):
        if (
            life.host in world.lost
            or not life.epoch
            or life.at not in ("", "parted")
            or life.todo[:1] != ("train",)
        ):
            continue
        if not any(what == f"{i} copies" for what, _ in following):
            raise Broken(f"{i} waits for its peer before it trains")
        own = dict(world.hosts).get(life.host, Arena())
        if life.epoch == world.epoch and own.seen < life.epoch:
            raise Broken(f"the arena of {i} was overwritten")
