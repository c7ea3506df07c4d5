"""Replicas on other hosts as a transition system: an owner, its sender, a link, a peer, and those who come after.

One run, two partitions. Host a has the owner's arena, host b keeps the replica; a job may start again on host c. A
version is an epoch and a step; a partition holds its version, or `MIXED` if two were written over each other.
Everything that others can see is one step. Each step names the function of scarctl that it stands for.

Which arenas are of the store's line is left to `terms_model`: here all are until a later epoch commits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.adversarial.replica_fetch import Fetching
from tests.adversarial.replica_world import (
    ALL,
    MIXED,
    NONE,
    Arena,
    Frame,
    Life,
    Link,
    Step,
    Version,
    World,
    arena_of,
    check,
    comes,
    put,
    with_arena,
    with_life,
)
from tests.adversarial.search import Broken, Result, search


@dataclass(frozen=True)
class Scenario:
    """`cast`: host and words of each life; the first is the owner. `fate`: see `World`."""

    name: str
    cast: tuple[tuple[str, str], ...]
    fate: str = ""


SHORT = (
    Scenario("a host is lost", (("a", "open train flush train"), ("b", "open train")), "lose:a"),
    Scenario("its peer dies in a copy", (("a", "open train train"), ("b", "open")), "die:b lose:a"),
    Scenario(
        "the cable is cut in a batch", (("a", "open train flush train"), ("b", "open")), "cut heal lose:a"
    ),
    Scenario("hand-overs", (("a", "open train train commit"), ("b", "open commit")), "lose:a"),
    Scenario(
        "cut off while the job continues",
        (("a", "open train train"), ("b", "open train commit")),
        "cut part:0 heal",
    ),
    Scenario(
        "the newest replica is cut off",
        (("a", "open train"), ("c", "open train commit"), ("b", "open")),
        "lose:a far:b near:b lose:c",
    ),
    Scenario(
        "the newest replica is back",
        (("a", "open train train"), ("c", "open train"), ("b", "open")),
        "lose:a far:b near:b",
    ),
    Scenario(
        "a host is lost after it has fetched",
        (("a", "open train flush"), ("c", "open"), ("a", "open")),
        "lose:b lose:c",
    ),
    Scenario("another start", (("a", "open train flush"), ("a", "open train"), ("b", "open")), "join lose:a"),
    Scenario("fetched while its owner sends", (("a", "open train train"), ("c", "open")), "part:0"),
    Scenario(
        "back on its host", (("a", "open train train"), ("b", "open train"), ("b", "open")), "far:a near:a"
    ),
    Scenario("a commit comes in between", (("a", "open train commit"), ("b", "open train commit")), "part:0"),
)
LONG = (
    Scenario(
        "cut off for longer", (("a", "open train train train"), ("b", "open train commit")), "cut part:0 heal"
    ),
    Scenario(
        "the newest replica is away",
        (("a", "open train commit train"), ("c", "open train commit"), ("b", "open train")),
        "cut lose:a far:b near:b lose:c",
    ),
)
MUTANTS = {
    "1: a copy's generation is not odd while it is written": "its peer dies in a copy",
    "1: a batch is copied as it arrives": "the cable is cut in a batch",
    "2: a hand-over appears before its rows": "hand-overs",
    "3: a peer lets earlier epochs write": "cut off while the job continues",
    "4: peers are believed whatever the store says": "the newest replica is cut off",
    "4: the order of copies is that of steps alone": "the newest replica is back",
    "5: fetching deletes": "a host is lost after it has fetched",
    "5: a replica goes when its successor begins": "another start",
    "6: a flush is acknowledged when it is sent": "a host is lost",
    "6: training waits for its peer": "the cable is cut in a batch",
    "fetch: an older epoch wins": "back on its host",
    "fetch: from a live run": "fetched while its owner sends",
    "fetch: an arena may change meanwhile": "fetched while its owner sends",
    "fetch: the own arena goes first": "a host is lost",
    "an epoch's record is put, not created": "a commit comes in between",
}
"""Rules left out, each with its number in the design, and the scenario that shows the consequence."""


class Model(Fetching):
    def __init__(self, mutant: str = "") -> None:
        assert mutant in ("", *MUTANTS)
        self.mutant = mutant

    def begin(self, scenario: Scenario) -> World:
        lives = [Life(host, tuple(words.split()), i - 1) for i, (host, words) in enumerate(scenario.cast)]
        return World(lives=tuple(lives), fate=tuple(scenario.fate.split()))

    def steps(self, world: World) -> Iterator[Step]:
        for i, life in enumerate(world.lives):
            if life.at != "over" and life.host not in world.lost:
                yield from self._life(world, i, life)
        yield from self._sender(world)
        yield from self._peer(world)
        if world.fate:
            word, _, what = world.fate[0].partition(":")
            yield from getattr(self, f"_{word}")(world._replace(fate=world.fate[1:]), what)

    # -- training processes ------------------------------------------------------------------------------------

    def _life(self, world: World, i: int, life: Life) -> Iterator[Step]:
        before = world.lives[life.after] if life.after >= 0 else None
        if life.epoch == 0 and not life.at and before is not None and before.at not in ("over", "parted"):
            return
        if life.epoch and life.at != "parted":
            loan = None if world.loan is not None and world.loan.life == i else world.loan
            yield f"{i} dies", with_life(world._replace(loan=loan), i, life._replace(at="over"))
        at = life.at if life.at not in ("", "parted") else (life.todo[0] if life.todo else "ends")
        if life.at in ("", "parted") and life.todo:
            life = life._replace(todo=life.todo[1:])
        yield from getattr(self, f"_{at}")(world, i, life)

    def _ends(self, world: World, i: int, life: Life) -> Iterator[Step]:
        yield f"{i} ends", with_life(world, i, life._replace(at="over"))

    def _open(self, world: World, i: int, life: Life) -> Iterator[Step]:
        """Model Store.state: records are read before peers are used. `step`: the number of records read."""
        yield f"{i} reads the store", with_life(world, i, life._replace(at="look", step=world.records))

    def _look(self, world: World, i: int, life: Life) -> Iterator[Step]:
        """Model fetch_memory: all hosts are asked. The newest arena is fetched, unless this host has it."""
        if world.link.staged is not None:
            return  # the folder is locked while a batch is copied
        best = self._best(world, life)
        if best not in ("", life.host):
            yield f"{i} asks {best}", with_life(world, i, life._replace(at="header", source=best))
            return
        arena = arena_of(world, best) if best else Arena()
        found = self._found(world, arena)
        self._check(world, found, torn=bool(arena.odd))
        life = life._replace(at="record", found=found, source=best)
        yield f"{i} finds {found} on {best or 'no host'}", with_life(world, i, life)

    def _check(self, world: World, found: tuple[Version, Version], *, torn: bool) -> None:
        """Check a start. torn: the arena's process has died while copying; then older copies of the store are right."""
        if MIXED in found:
            raise Broken(f"a resume has a torn copy: {found}")
        there = {arena.head[0] for name, arena in world.hosts if name not in world.lost}
        for epoch, base in world.bases:
            known = epoch <= world.committed or epoch in there
            if known and any(v[0] < epoch and v > base for v in found):
                raise Broken(f"a resume has {found}, and epoch {epoch} has continued from {base}")
        if world.promised > NONE and world.epoch < 3 and not torn and min(found) < world.promised:
            raise Broken(f"a resume has {found}, and {world.promised} was acknowledged")

    def _record(self, world: World, i: int, life: Life) -> Iterator[Step]:
        """Model StoreWriter.open: exclusive creation decides who is the owner. Then the arena is taken, or fetched."""
        if life.step != world.records and not self._without("an epoch's record"):
            yield f"{i} finds another's record", with_life(world, i, life._replace(at="open"))
            return
        epoch = world.epoch + 1
        arena = Arena(epoch, life.found, head=max(life.found))
        bases = (*world.bases, (epoch, max(life.found)))
        made = world._replace(epoch=epoch, records=world.records + 1, bases=bases)
        made = with_arena(made, life.host, arena)
        if made.loan is not None and made.loan.source == life.host:
            made = made._replace(loan=None)  # as Runs.claim does
        life = life._replace(at="", epoch=epoch, step=max(life.found)[1])
        yield f"{i} begins epoch {epoch} on {life.host}", with_life(made, i, life)

    def _train(self, world: World, i: int, life: Life) -> Iterator[Step]:
        """Model an iteration with its copies: generations are odd meanwhile."""
        if (
            self._without("6: training")
            and i == 0
            and life.step
            and world.link.marked < (life.epoch, life.step)
        ):
            return
        arena = arena_of(world, life.host)
        made = with_arena(world, life.host, arena._replace(odd=frozenset(ALL)))
        yield f"{i} copies", with_life(made, i, life._replace(at="copied"))

    def _copied(self, world: World, i: int, life: Life) -> Iterator[Step]:
        """Copy both partitions at once, or only one: then the other keeps its older copy."""
        version = (life.epoch, life.step + 1)
        arena = arena_of(world, life.host)
        done = arena._replace(copies=(version, version), odd=frozenset(), head=version)
        done = done._replace(handovers=done.handovers | {version}, seen=life.epoch)
        yield (
            f"{i} hands {version} over",
            with_life(with_arena(world, life.host, done), i, life._replace(at="", step=version[1])),
        )

    def _commit(self, world: World, i: int, life: Life) -> Iterator[Step]:
        """Model StoreWriter.commit: only a record of the newest epoch counts."""
        if world.epoch != life.epoch:
            yield f"{i} is fenced by the store", with_life(world, i, life._replace(at="over"))
            return
        arena = arena_of(world, life.host)
        if max(arena.copies) < max(world.durable) and world.committed == life.epoch:
            raise Broken(f"{i} saves {arena.copies} over {world.durable}: two owners of epoch {life.epoch}")
        if world.committed and world.committed < life.epoch and max(life.found) < max(world.durable):
            raise Broken(f"{i} has continued from {life.found}, and the store had {world.durable}")
        made = world._replace(records=world.records + 1, committed=life.epoch)
        partly = made._replace(durable=(arena.copies[0], world.durable[1]))
        yield f"{i} commits a part", with_life(partly, i, life._replace(at="rest"))

    def _rest(self, world: World, i: int, life: Life) -> Iterator[Step]:
        """Model the commit of the other partition."""
        if world.epoch != life.epoch:
            yield f"{i} is fenced by the store", with_life(world, i, life._replace(at="over"))
            return
        arena = arena_of(world, life.host)
        made = world._replace(records=world.records + 1, durable=arena.copies)
        done = with_arena(made, life.host, arena._replace(handovers=frozenset()))
        yield f"{i} commits", with_life(done, i, life._replace(at=""))

    def _flush(self, world: World, i: int, life: Life) -> Iterator[Step]:
        """Model Session.flush with peers, which returns once the peer has acknowledged the mark, or gives up."""
        version = (life.epoch, life.step)
        sent = any(frame.version == version for frame in world.link.wire) and self._without("6: a flush")
        if world.link.marked == version or sent:
            done = world._replace(promised=version)
            yield f"{i} has flushed {version}", with_life(done, i, life._replace(at=""))
        yield f"{i} waits no longer", with_life(world, i, life._replace(at=""))

    # -- the owner's daemon and its link -------------------------------------------------------------------------

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
            if arena.head > link.marked:
                mark = Frame("mark", owner.epoch, (), arena.head, arena.handovers)
                first = (mark._replace(kind="early"),) if self._without("2:") else ()
                changed = link._replace(round=mark, wire=(*link.wire, *first))
                yield f"a round begins at {arena.head}", world._replace(link=changed)
            return
        for p in ALL:
            if link.has[p] != arena.copies[p]:
                if p not in arena.odd:
                    frame = Frame("batch", owner.epoch, (p,), arena.copies[p])
                    has = put(link.has, (p,), arena.copies[p])
                    sent = link._replace(has=has, wire=(*link.wire, frame))
                    yield f"sends {p} of {arena.copies[p]}", world._replace(link=sent)
                return
        sent = link._replace(round=None, wire=(*link.wire, link.round))
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
        have = tuple(NONE if p in there.odd else there.copies[p] for p in ALL)
        link = world.link._replace(open=True, has=(have[0], have[1]), round=None, wire=(), marked=NONE)
        yield f"the link is made: b has {have}", made._replace(link=link)

    def _peer(self, world: World) -> Iterator[Step]:
        """Model Host._write, Replica.apply, Replica.mark: frame by frame; a copy is two steps."""
        link = world.link
        if "b" in world.lost:
            return
        lent = world.loan is not None and world.loan.source == "b"
        if lent and not self._without("fetch: an arena may change"):
            return  # its folder is locked
        if link.staged is not None:
            arena, place = self._target(world, link.staged.epoch)
            if arena is not None:
                done = arena._replace(
                    copies=put(arena.copies, link.staged.ids, link.staged.version),
                    odd=arena.odd - set(link.staged.ids),
                )
                yield "b has copied", with_arena(world, place, done)._replace(link=link._replace(staged=None))
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
            odd = arena.odd if self._without("1: a copy") else arena.odd | set(frame.ids)
            torn = put(arena.copies, frame.ids, MIXED)
            made = with_arena(world, place, arena._replace(odd=odd, copies=torn))
            yield f"b copies {frame.ids} of {frame.version}", made._replace(link=rest._replace(staged=frame))
        elif frame.kind == "early":
            yield (
                "b keeps hand-overs",
                with_arena(world, place, arena._replace(handovers=frame.handovers))._replace(link=rest),
            )
        else:
            done = arena._replace(head=frame.version, handovers=frame.handovers, complete=True)
            hosts = tuple(item for item in world.hosts if item[0] not in ("b", "b+"))
            marked = rest._replace(marked=frame.version)
            yield (
                f"b has {frame.version}",
                with_arena(world._replace(hosts=hosts), "b", done)._replace(link=marked),
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

    # -- fate ------------------------------------------------------------------------------------------------------

    def _lose(self, world: World, host: str) -> Iterator[Step]:
        """Lose a host with its processes and its memory."""
        hosts = tuple(item for item in world.hosts if item[0] not in (host, f"{host}+"))
        lives = tuple(
            life._replace(at="over") if life.host == host and life.epoch else life for life in world.lives
        )
        # The peer of a lost host still has the batch that it copies.
        wire = {"a": Link(staged=world.link.staged), "b": Link()}.get(host, world.link)
        loan = world.loan if world.loan and lives[world.loan.life].at != "over" else None
        made = world._replace(hosts=hosts, lost=world.lost | {host}, lives=lives, link=wire, loan=loan)
        # Lives that start later do so on a new machine of that name.
        yield (
            f"host {host} is lost",
            made._replace(lost=frozenset(made.lost - {host}) if comes(made, host) else made.lost),
        )

    def _die(self, world: World, host: str) -> Iterator[Step]:
        """Kill the peer's daemon: the staged batch is lost, odd generations stay."""
        yield f"the daemon of {host} is killed", world._replace(link=Link(up=world.link.up))

    def _cut(self, world: World, _: str) -> Iterator[Step]:
        """Cut the link: frames on the way are lost, perhaps in part, which their checksum shows."""
        link = world.link
        made = world._replace(link=Link(up=False, staged=link.staged))
        yield "the cable is cut", made
        if self._without("1: a batch") and link.wire and link.wire[0].kind == "batch":
            frame = link.wire[0]
            arena, place = self._target(world, frame.epoch)
            if arena is not None:
                torn = arena._replace(copies=put(arena.copies, frame.ids, MIXED))
                yield "the cable is cut in a batch", with_arena(made, place, torn)

    def _heal(self, world: World, _: str) -> Iterator[Step]:
        if world.link.staged is None:
            yield "the cable is mended", world._replace(link=world.link._replace(up=True))

    def _part(self, world: World, number: str) -> Iterator[Step]:
        """Start the next life although the former one lives, with its daemon: the controller takes it for dead."""
        i = int(number)
        if world.lives[i].epoch and not world.lives[i].at:
            yield f"{i} is taken for dead", with_life(world, i, world.lives[i]._replace(at="parted"))

    def _far(self, world: World, host: str) -> Iterator[Step]:
        """Make a host take no part in the next starts, with its memory kept."""
        yield f"{host} is away", world._replace(lost=world.lost | {host})

    def _near(self, world: World, host: str) -> Iterator[Step]:
        yield f"{host} is back", world._replace(lost=world.lost - {host})

    def _join(self, world: World, _: str) -> Iterator[Step]:
        """Let the next life of the owner's host take over the sender."""
        first, second, *others = world.lives
        if second.epoch and first.at == "over":
            lives = (second._replace(after=-1), first._replace(after=-1), *others)
            yield "the second life sends", world._replace(lives=lives, link=Link())


def explore(scenario: Scenario, mutant: str = "") -> Result:
    """Return the number of reachable states, or the shortest way to a broken one."""
    model = Model(mutant)

    def following(world: World) -> list[Step]:
        steps = list(model.steps(world))
        check(world, steps)
        return steps

    return search(model.begin(scenario), following)
