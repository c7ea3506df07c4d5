"""Replicas on other hosts as a transition system: an owner, its sender, a link, a peer, and those who come after.

One run, two partitions, of which the second changes in every other step only. Host a has the owner's arena, host b
keeps the replica; a job may start again on host c. A version is an epoch and a step; a copy that was written over is
`MIXED`. Everything that others can see is one step. Each step names the function of scarctl that it stands for. The
rules; `MUTANTS` leaves them out:

1. A sender holds the slot that it sends, together with the saver. It sends a copy, or the mark, only if the hold is
   there after the last byte. A copy that is being written has no version. A batch is whole before it is written.
2. A batch goes into the replica's slot that is not current. The mark is the last of its round: the other copies are
   carried over from the current slot, and then the slots change places. A new connection begins with the copies of
   the current slot; those of the other one count only until the first mark.
3. A peer that has seen a later epoch refuses an earlier one.
4. Memory counts only if the store has nothing of a later epoch; then the newest does, by epoch and step.
5. Fetching deletes nothing, and a replica stays until its successor has a mark.
6. A flush is answered by the mark of a round that began later, with what memory had then: not if the saver holds an
   earlier state. Training never waits for a peer: it leaves a copy out, or ends the hold.

Which arenas are of the store's line is left to `terms_model`: here all are until a later epoch commits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.adversarial.replica_fetch import Fetching
from tests.adversarial.replica_link import Linked
from tests.adversarial.replica_world import (
    ALL,
    MIXED,
    NONE,
    Arena,
    Copies,
    Life,
    Link,
    Slot,
    Step,
    World,
    arena_of,
    check,
    comes,
    put,
    with_arena,
    with_life,
    with_state,
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
    Scenario("commits", (("a", "open train train commit"), ("b", "open commit")), "lose:a"),
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
    Scenario("fetched while its owner sends", (("a", "open train train train"), ("c", "open")), "part:0"),
    Scenario(
        "a flush while the saver holds",
        (("a", "open train save train flush"), ("b", "open")),
        "lose:a",
    ),
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
    "1: a sender does not look at its hold": "fetched while its owner sends",
    "1: a round whose hold has ended has a mark": "fetched while its owner sends",
    "1: a copy has its version while it is written": "its peer dies in a copy",
    "1: a batch is copied as it arrives": "the cable is cut in a batch",
    "2: a batch goes into the current slot": "its peer dies in a copy",
    "2: a mark comes before its copies": "commits",
    "2: a mark carries nothing over": "commits",
    "2: copies without a mark count": "its peer dies in a copy",
    "3: a peer lets earlier epochs write": "cut off while the job continues",
    "4: peers are believed whatever the store says": "the newest replica is cut off",
    "4: the order of copies is that of steps alone": "the newest replica is back",
    "5: fetching deletes": "a host is lost after it has fetched",
    "5: a replica goes when its successor begins": "another start",
    "6: a flush is acknowledged when it is sent": "a host is lost",
    "6: an earlier state answers": "a flush while the saver holds",
    "6: training waits for its peer": "the cable is cut in a batch",
    "fetch: an older epoch wins": "back on its host",
    "fetch: from a live run": "fetched while its owner sends",
    "fetch: an arena may change meanwhile": "fetched while its owner sends",
    "fetch: the own arena goes first": "a host is lost",
    "an epoch's record is put, not created": "a commit comes in between",
}
"""Rules left out, each with its number above, and the scenario that shows the consequence."""


class Model(Fetching, Linked):
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
        if world.saving:
            yield "the saver lets go", world._replace(saving="")
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
            saving = world.saving if i else ""
            dead = world._replace(loan=loan, saving=saving)
            yield f"{i} dies", with_life(dead, i, life._replace(at="over"))
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
        self._check(world, found)
        life = life._replace(at="record", found=found, source=best)
        yield f"{i} finds {found} on {best or 'no host'}", with_life(world, i, life)

    def _check(self, world: World, found: Copies) -> None:
        if MIXED in found:
            raise Broken(f"a resume has a torn copy: {found}")
        there = {arena.slot.head[0] for name, arena in world.hosts if name not in world.lost}
        for epoch, base in world.bases:
            known = epoch <= world.committed or epoch in there
            if known and any(v[0] < epoch and v > base for v in found):
                raise Broken(f"a resume has {found}, and epoch {epoch} has continued from {base}")
        if world.epoch < 3 and any(found[p] < world.promised[p] for p in ALL):
            raise Broken(f"a resume has {found}, and {world.promised} was acknowledged")

    def _record(self, world: World, i: int, life: Life) -> Iterator[Step]:
        """Model StoreWriter.open: exclusive creation decides who is the owner. Then the arena is taken, or fetched."""
        if life.step != world.records and not self._without("an epoch's record"):
            yield f"{i} finds another's record", with_life(world, i, life._replace(at="open"))
            return
        epoch = world.epoch + 1
        arena = Arena(epoch, Slot(max(life.found), life.found))
        bases = (*world.bases, (epoch, max(life.found)))
        made = world._replace(epoch=epoch, records=world.records + 1, bases=bases)
        made = with_state(made, life.host, arena)
        if made.loan is not None and made.loan.source == life.host:
            made = made._replace(loan=None)  # as Runs.claim does
        life = life._replace(at="", epoch=epoch, step=max(life.found)[1])
        yield f"{i} begins epoch {epoch} on {life.host}", with_life(made, i, life)

    def _train(self, world: World, i: int, life: Life) -> Iterator[Step]:
        """Model an iteration with its copy, into the slot that is not current. If that is held, both ways are open."""
        if (
            self._without("6: training")
            and i == 0
            and life.step
            and world.link.marked < (life.epoch, life.step)
        ):
            return
        if i == 0 and "spare" in (world.link.held, world.saving):
            yield f"{i} leaves a copy out", with_life(world, i, life._replace(at=""))
            ended = {"spare": "lost"}
            link = world.link._replace(held=ended.get(world.link.held, world.link.held))
            world = world._replace(link=link, saving=ended.get(world.saving, world.saving))
        arena = arena_of(world, life.host)
        made = with_arena(world, life.host, arena._replace(spare=Slot(), torn=frozenset(ALL)))
        yield f"{i} copies", with_life(made, i, life._replace(at="copied"))

    def _copied(self, world: World, i: int, life: Life) -> Iterator[Step]:
        """Make the slot current. What has not changed keeps its version."""
        version = (life.epoch, life.step + 1)
        arena = arena_of(world, life.host)
        copies = put(arena.slot.copies, ALL if version[1] % 2 else (0,), version)
        done = Arena(life.epoch, Slot(version, copies), arena.slot)
        if i == 0:
            flipped = {"current": "spare"}
            link = world.link._replace(held=flipped.get(world.link.held, world.link.held))
            world = world._replace(link=link, saving=flipped.get(world.saving, world.saving))
        made = with_state(world, life.host, done)
        yield f"{i} has copied {version}", with_life(made, i, life._replace(at="", step=version[1]))

    def _commit(self, world: World, i: int, life: Life) -> Iterator[Step]:
        """Model StoreWriter.commit: only a record of the newest epoch counts."""
        if world.epoch != life.epoch:
            yield f"{i} is fenced by the store", with_life(world, i, life._replace(at="over"))
            return
        copies = arena_of(world, life.host).slot.copies
        if max(copies) < max(world.durable) and world.committed == life.epoch:
            raise Broken(f"{i} saves {copies} over {world.durable}: two owners of epoch {life.epoch}")
        if world.committed and world.committed < life.epoch and max(life.found) < max(world.durable):
            raise Broken(f"{i} has continued from {life.found}, and the store had {world.durable}")
        made = world._replace(records=world.records + 1, committed=life.epoch)
        partly = made._replace(durable=(copies[0], world.durable[1]))
        yield f"{i} commits a part", with_life(partly, i, life._replace(at="rest"))

    def _rest(self, world: World, i: int, life: Life) -> Iterator[Step]:
        """Model the commit of the other partition."""
        if world.epoch != life.epoch:
            yield f"{i} is fenced by the store", with_life(world, i, life._replace(at="over"))
            return
        copies = arena_of(world, life.host).slot.copies
        made = world._replace(records=world.records + 1, durable=copies)
        yield f"{i} commits", with_life(made, i, life._replace(at=""))

    def _save(self, world: World, i: int, life: Life) -> Iterator[Step]:
        """Model Persister.persist of life 0: it holds the current slot, or joins the hold of the sender."""
        held = world.link.held if world.link.held in ("current", "spare") else "current"
        yield f"the saver of {i} holds", with_life(world._replace(saving=held), i, life._replace(at=""))

    def _flush(self, world: World, i: int, life: Life) -> Iterator[Step]:
        """Model Session.flush with peers, of life 0: it asks for a round that begins from now on."""
        asked = world._replace(
            asked=arena_of(world, life.host).slot.copies, link=world.link._replace(answered=False)
        )
        yield f"{i} asks its peer", with_life(asked, i, life._replace(at="answer"))

    def _answer(self, world: World, i: int, life: Life) -> Iterator[Step]:
        """Model Run.await_peers, which returns once the peer has acknowledged the mark, or gives up."""
        sent = any(frame.answers for frame in world.link.wire) and self._without("6: a flush")
        if world.link.answered or sent:
            done = world._replace(promised=world.asked)
            yield f"{i} has flushed {world.asked}", with_life(done, i, life._replace(at=""))
        yield f"{i} waits no longer", with_life(world, i, life._replace(at=""))

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
        saving = "" if lives[0].at == "over" else world.saving
        made = world._replace(
            hosts=hosts, lost=world.lost | {host}, lives=lives, link=wire, loan=loan, saving=saving
        )
        # Lives that start later do so on a new machine of that name.
        yield (
            f"host {host} is lost",
            made._replace(lost=frozenset(made.lost - {host}) if comes(made, host) else made.lost),
        )

    def _die(self, world: World, host: str) -> Iterator[Step]:
        """Kill the peer's daemon: the staged batch is lost, and its copies have no version."""
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
                torn = arena._replace(
                    spare=Slot(NONE, put(arena.spare.copies, frame.ids, frame.version)),
                    torn=arena.torn | set(frame.ids),
                )
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
