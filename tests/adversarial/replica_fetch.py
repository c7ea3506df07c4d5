"""Fetch an arena from another host, as steps of the model of replicas: `scarctl.peers.fetch` and `peers.lender`.

The header of the arena's file is read first, then the rows of each partition. The one that asks changes its own arena
only at the end. Meanwhile hosts are lost, owners that were cut off send, and processes of the other host start.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.adversarial.replica_world import (
    ALL,
    MIXED,
    NONE,
    Arena,
    Copies,
    Life,
    Loan,
    Slot,
    Step,
    World,
    arena_of,
    lives_on,
    put,
    with_arena,
    with_life,
)


class Fetching:
    """Part of `tests.adversarial.replicas.Model`."""

    mutant: str

    def _without(self, rule: str) -> bool:
        return self.mutant.startswith(rule)

    def _check(self, world: World, found: Copies) -> None:
        raise NotImplementedError

    def _found(self, world: World, arena: Arena) -> Copies:
        """Return the copies of a start: those of the arena that are newer than the store's."""
        found = [world.durable[p] for p in ALL]
        by_step = self._without("4: the order")
        for p in ALL:
            copy = arena.slot.copies[p]
            if copy == MIXED or (copy > found[p] and not (by_step and copy[1] <= found[p][1])):
                found[p] = copy
        return found[0], found[1]

    def _best(self, world: World, life: Life) -> str:
        """Model fetch_memory's choice: the newest by epoch and step, of those that belong to the store. "" for none."""
        hosts = {
            name: arena
            for name, arena in world.hosts
            if name not in world.lost and arena.complete and arena.slot.head > NONE
        }
        if not self._without("fetch: from a live run"):
            hosts = {name: arena for name, arena in hosts.items() if not lives_on(world, name)}
        if not self._without("4: peers are believed"):
            hosts = {name: arena for name, arena in hosts.items() if arena.seen >= world.committed}
        if self._without("4: the order") or self._without("fetch: an older epoch wins"):
            return max(hosts, key=lambda name: (hosts[name].slot.head[1], name), default="")
        return max(
            hosts, key=lambda name: (hosts[name].seen, hosts[name].slot.head, name == life.host), default=""
        )

    def _header(self, world: World, i: int, life: Life) -> Iterator[Step]:
        """Model Lender._serve_fetch: the folder is locked, the header and the small files are sent."""
        if world.link.staged is not None or world.loan is not None:
            return
        if self._best(world, life) != life.source:
            yield f"{i} is refused by {life.source}", with_life(world, i, life._replace(at="open"))
            return
        made = world._replace(loan=Loan(i, life.source, arena_of(world, life.source)))
        if self._without("fetch: the own arena goes first"):
            made = with_arena(made, life.host, Arena())
        yield f"{i} begins to fetch from {life.source}", with_life(made, i, life._replace(at="row"))

    def _row(self, world: World, i: int, life: Life) -> Iterator[Step]:
        """Model PIECE: the rows of the next partition, as they are now."""
        loan = world.loan
        if loan is None or life.source in world.lost:
            failed = world if loan is None else world._replace(loan=None)
            yield f"{i} does not get all of it", with_life(failed, i, life._replace(at="open"))
            return
        p, there, arena = loan.rows, arena_of(world, life.source), loan.arena
        # The slot that was current when the header was read: it may be the spare one by now, and be written.
        flipped = there.slot.head != arena.slot.head
        if (there.spare if flipped else there.slot).copies[p] != arena.slot.copies[p]:
            arena = arena._replace(slot=arena.slot._replace(copies=put(arena.slot.copies, (p,), MIXED)))
        made = world._replace(loan=loan._replace(arena=arena, rows=p + 1))
        yield f"{i} gets {p}", with_life(made, i, life._replace(at="row" if p < ALL[-1] else "install"))

    def _install(self, world: World, i: int, life: Life) -> Iterator[Step]:
        """Model Incoming.install: the new arena takes the place. Then the other host may release its run."""
        loan = world.loan
        if loan is None:
            yield f"{i} does not get all of it", with_life(world, i, life._replace(at="open"))
            return
        arena = loan.arena._replace(spare=Slot(), torn=frozenset(), owned=0)
        found = self._found(world, arena)
        self._check(world, found)
        made = with_arena(world._replace(loan=None), life.host, arena)
        if self._without("5: fetching"):
            made = with_arena(made, life.source, Arena())
        life = life._replace(at="record", found=found)
        yield f"{i} has fetched {found} from {life.source}", with_life(made, i, life)
