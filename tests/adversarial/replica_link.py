"""Send an owner's memory to its peer, as steps of the model of replicas: `peers.follower` and `peers.replica`."""

from __future__ import annotations

from collections.abc import Iterator

from tests.adversarial.replica_world import (
    ALL,
    MIXED,
    NONE,
    Arena,
    Frame,
    Life,
    Link,
    Slot,
    Step,
    World,
    arena_of,
    put,
    with_arena,
)


class Linked:
    """Part of `tests.adversarial.replicas.Model`."""

    mutant: str

    def _without(self, rule: str) -> bool:
        return self.mutant.startswith(rule)

    def _sender(self, world: World) -> Iterator[Step]:
        """Model Sender._converse and Follower.round of life 0. The sender outlives its training process."""
        owner, link = world.lives[0], world.link
        if not owner.epoch or owner.host in world.lost or not link.up or "b" in world.lost:
            return
        arena = arena_of(world, owner.host)
        if arena.seen != owner.epoch:
            return  # another life has its arena now
        if not link.open and link.staged is None:
            yield from self._connect(world, owner)
            return
        if not link.open or len(link.wire) > 1:
            return
        if link.round is None:
            held = world.saving if world.saving in ("current", "spare") else "current"
            head = (arena.slot if held == "current" else arena.spare).head
            newest = held == "current" or self._without("6: an earlier")
            asked = owner.at == "answer" and not link.answered and newest
            if head > link.marked or (asked and head > NONE):
                mark = Frame("mark", owner.epoch, (), head, answers=asked)
                first = (mark,) if self._without("2: a mark comes") else ()
                changed = link._replace(round=mark, held=held, wire=(*link.wire, *first))
                yield f"a round begins at {head}", world._replace(link=changed)
            return
        slot = arena.slot if link.held == "current" else arena.spare
        if link.held == "lost":
            torn = self._without("1: a sender")
            if not torn and not self._without("1: a round"):
                yield "a round has lost its hold", world._replace(link=link._replace(round=None, held=""))
                return
            slot = Slot(NONE, (link.round.version,) * 2 if torn else link.has)
        for p in ALL:
            if link.has[p] != slot.copies[p]:
                frame = Frame("batch", owner.epoch, (p,), slot.copies[p], link.held == "lost")
                has = put(link.has, (p,), slot.copies[p])
                sent = link._replace(has=has, wire=(*link.wire, frame))
                yield f"sends {p} of {slot.copies[p]}", world._replace(link=sent)
                return
        sent = link._replace(round=None, held="", wire=(*link.wire, link.round))
        yield f"sends its mark of {link.round.version}", world._replace(link=sent)

    def _connect(self, world: World, owner: Life) -> Iterator[Step]:
        """Model Replica.begin: a later epoch fences; the same owner's replica continues; otherwise there is a
        successor.
        """
        there = dict(world.hosts).get("b", Arena())
        if there.seen > owner.epoch and not self._without("3:"):
            return
        grown = dict(world.hosts).get("b+")
        if there.owned == owner.epoch or (self._without("3:") and there.seen > owner.epoch):
            made = world
        elif grown is not None and grown.owned == owner.epoch:
            there, made = grown, world
        else:
            there = Arena(owner.epoch, owned=owner.epoch, complete=False)
            made = with_arena(world, "b+", there)
            if self._without("5: a replica goes"):
                made = with_arena(made, "b", Arena())
        copies, spare = there.slot.copies, there.spare.copies
        found = {p for p in ALL if spare[p] > NONE}
        if there.slot.head == NONE or self._without("2: copies without"):
            copies = (spare[0] if 0 in found else copies[0], spare[1] if 1 in found else copies[1])
        written = frozenset(found if there.slot.head == NONE else ())
        link = Link(open=True, has=copies, written=written)
        yield f"the link is made: b has {copies}", made._replace(link=link)

    def _peer(self, world: World) -> Iterator[Step]:
        """Model Host._write, Replica.apply, Replica.mark: frame by frame; a copy is two steps."""
        link = world.link
        if "b" in world.lost:
            return
        lent = world.loan is not None and world.loan.source == "b"
        if lent and not self._without("fetch: an arena may change"):
            return  # its folder is locked
        inside = self._without("2: a batch")
        if link.staged is not None:
            arena, place = self._target(world, link.staged.epoch)
            if arena is not None:
                ids, version = link.staged.ids, link.staged.version
                torn = arena.torn | set(ids) if link.staged.torn else arena.torn - set(ids)
                slot = arena.slot if inside else arena.spare
                slot = slot._replace(copies=put(slot.copies, ids, version))
                done = arena._replace(slot=slot) if inside else arena._replace(spare=slot, torn=torn)
                copied = link._replace(staged=None, written=link.written | set(ids))
                yield "b has copied", with_arena(world, place, done)._replace(link=copied)
            return
        if not link.wire or not link.up:
            return
        frame = link.wire[0]
        rest = link._replace(wire=link.wire[1:])
        arena, place = self._target(world, frame.epoch)
        if arena is None:
            refused = Link(up=link.up)
            yield "b refuses: it has seen a later epoch", world._replace(link=refused)
        elif frame.kind == "batch":
            version = frame.version if self._without("1: a copy") else NONE
            begun = arena._replace(
                spare=Slot(NONE, put(arena.spare.copies, frame.ids, version)),
                torn=arena.torn | set(frame.ids),
            )
            if inside:
                begun = arena._replace(
                    slot=arena.slot._replace(copies=put(arena.slot.copies, frame.ids, MIXED))
                )
            made = with_arena(world, place, begun)
            yield f"b copies {frame.ids} of {frame.version}", made._replace(link=rest._replace(staged=frame))
        else:
            hosts = tuple(item for item in world.hosts if item[0] not in ("b", "b+"))
            made = with_arena(world._replace(hosts=hosts), "b", self._flipped(arena, frame, link.written))
            answered = link.answered or frame.answers
            marked = rest._replace(marked=frame.version, answered=answered, written=frozenset())
            yield f"b has {frame.version}", made._replace(link=marked)

    def _flipped(self, arena: Arena, mark: Frame, written: frozenset[int]) -> Arena:
        """Model Replica._flip."""
        if mark.version == arena.slot.head and not written:
            return arena
        copies = arena.slot.copies
        for p in ALL:
            if p in written:
                copies = put(copies, (p,), MIXED if p in arena.torn else arena.spare.copies[p])
            elif self._without("2: a mark carries"):
                copies = put(copies, (p,), arena.spare.copies[p])
        return arena._replace(
            slot=Slot(mark.version, copies), spare=arena.slot, torn=frozenset(), complete=True
        )

    def _target(self, world: World, epoch: int) -> tuple[Arena | None, str]:
        """Return the replica of this owner on host b. None if it was taken, or a later epoch was seen."""
        hosts = dict(world.hosts)
        if "b+" in hosts and hosts["b+"].owned == epoch:
            there = hosts.get("b", Arena())
            return (None, "") if there.seen > epoch and not self._without("3:") else (hosts["b+"], "b+")
        arena = hosts.get("b")
        if arena is not None and (arena.owned == epoch or self._without("3:")):
            return arena, "b"
        return None, ""
