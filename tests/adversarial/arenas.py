"""Stores and arenas of several hosts as a transition system, next to that of `tests.adversarial.protocol`.

A process has a host and a store. What it has trained is the list of its steps since the beginning of the run; the
newest of it is in the host's arena, what it has committed in the log. Everything that others can see is one step, a
process may die after each, and the next one of its host begins then. Stores are copied, and replaced by their backup.

Whose memory is still that of a store is told here by what happened, and by the arena by the lines that it has noted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.adversarial.search import Broken, Result, search

Content = tuple[str, ...]
"""The steps from which a state has come."""


class Rec(NamedTuple):
    uid: str
    line: str
    content: Content
    change: bool
    """A commit or a roll-back."""


class Arena(NamedTuple):
    line: str = ""
    next_line: str = ""
    content: Content = ()
    basis: str = ""
    """The newest change of its store when its process last read or wrote it."""
    before: str = ""
    """The same before a change that the process does not know yet, and which does not exist for it."""


class Life(NamedTuple):
    name: str
    host: str
    store: str
    todo: tuple[str, ...]
    after: int = -1
    """The life on the same host that has to end before."""
    at: str = ""
    seq: int = -1
    content: Content = ()
    want: Rec | None = None
    count: int = 0


class World(NamedTuple):
    logs: tuple[tuple[str, tuple[Rec, ...]], ...]
    arenas: tuple[tuple[tuple[str, str], Arena], ...]
    lives: tuple[Life, ...]


Step = tuple[str, World]


@dataclass(frozen=True)
class Scenario:
    """`cast`: host, store and words of each life. A life begins when the previous life on its host has ended."""

    name: str
    cast: tuple[tuple[str, str, str], ...]


LONG = (
    Scenario(
        "rolled back at another host",
        (
            ("a", "run", "open step commit step commit step"),
            ("b", "run", "open back step commit"),
            ("a", "run", "open step commit"),
        ),
    ),
    Scenario(
        "gone on at another host",
        (
            ("a", "run", "open step commit step again step commit"),
            ("b", "run", "open step commit prune"),
            ("a", "run", "open commit"),
        ),
    ),
    Scenario(
        "replaced by its backup",
        (
            ("a", "run", "open step commit step commit step"),
            ("x", "run", "backup restore"),
            ("a", "run", "open step commit"),
            ("b", "run", "open"),
        ),
    ),
)

SHORT = (
    Scenario(
        "rolled back elsewhere",
        (("a", "run", "open step commit step commit"), ("b", "run", "open back"), ("a", "run", "open")),
    ),
    Scenario(
        "gone on elsewhere",
        (("a", "run", "open step commit again step"), ("b", "run", "open step commit"), ("a", "run", "open")),
    ),
    Scenario(
        "copied",
        (
            ("a", "run", "open step commit step commit step"),
            ("x", "run", "copy"),
            ("a", "copy", "open step commit"),
            ("a", "run", "open step"),
        ),
    ),
    Scenario(
        "put back",
        (("a", "run", "open step commit step"), ("x", "run", "backup restore"), ("a", "run", "open")),
    ),
    Scenario(
        "pruned in between",
        (("a", "run", "open step commit step commit step"), ("x", "run", "prune"), ("a", "run", "open step")),
    ),
)
MUTANTS = {
    "arenas are believed whatever the store says": "rolled back elsewhere",
    "arenas are found by the store's identity alone": "copied",
    "the record under way is not announced": "pruned in between",
    "compaction begins a line": "pruned in between",
    "a process that opens again does not look": "gone on elsewhere",
}
"""Rules left out, and the scenario that shows the consequence."""


class Model:
    def __init__(self, mutant: str = "") -> None:
        assert mutant in ("", *MUTANTS)
        self.mutant = mutant

    def begin(self, scenario: Scenario) -> World:
        first = (Rec("first", "first", (), True),)
        lives: list[Life] = []
        for i, (host, store, words) in enumerate(scenario.cast):
            before = [n for n, life in enumerate(lives) if life.host == host]
            lives.append(Life(f"{host}{i}", host, store, tuple(words.split()), max(before, default=-1)))
        return World((("run", first),), (), tuple(lives))

    def steps(self, world: World) -> Iterator[Step]:
        for i, life in enumerate(world.lives):
            if life.at == "over" or (life.after >= 0 and world.lives[life.after].at != "over"):
                continue
            if life.host != "x" and life.seq >= 0:
                yield f"{life.name} dies", _live(world, i, life._replace(at="over"))
            at = life.at or (life.todo[0] if life.todo else "over")
            if not life.at and life.todo:
                life = life._replace(todo=life.todo[1:])
            if at == "over":
                yield f"{life.name} ends", _live(world, i, life._replace(at="over"))
                continue
            yield from getattr(self, f"_{at}")(world, i, life)

    # -- what a life does --------------------------------------------------------------------------------------

    def _key(self, life: Life) -> tuple[str, str]:
        alone = self.mutant == "arenas are found by the store's identity alone"
        return life.host, "" if alone else life.store

    def _open(self, world: World, i: int, life: Life) -> Iterator[Step]:
        """Model Store.state, followed by an epoch record, which passes the line on."""
        log = _log(world, life.store)
        if not log:
            return  # no process has copied it yet
        want = Rec(f"{life.name}.{life.count}", log[-1].line, log[-1].content, False)
        life = life._replace(seq=len(log) - 1, want=want, at="put_open", count=life.count + 1)
        yield f"{life.name} reads {life.store}", _live(world, i, life)

    def _again(self, world: World, i: int, life: Life) -> Iterator[Step]:
        """Model LocalSaver.open(again=True) after its daemon's death. A process of another line fences no other."""
        log, arena = _log(world, life.store), self._arena(world, life)
        if not self._kin(arena, log[-1]) and self.mutant != "a process that opens again does not look":
            yield f"{life.name} is fenced", _live(world, i, life._replace(at="over"))
            return
        want = Rec(f"{life.name}.{life.count}", log[-1].line, log[-1].content, False)
        life = life._replace(seq=len(log) - 1, want=want, at="put_again", count=life.count + 1)
        yield f"{life.name} reads {life.store} again", _live(world, i, life)

    def _put_open(self, world: World, i: int, life: Life) -> Iterator[Step]:
        yield from self._put(world, i, life, "check", "open")

    def _put_again(self, world: World, i: int, life: Life) -> Iterator[Step]:
        yield from self._put(world, i, life, "check_again", "again")

    def _put_change(self, world: World, i: int, life: Life) -> Iterator[Step]:
        yield from self._put(world, i, life, "note", "over")

    def _put(self, world: World, i: int, life: Life, then: str, beaten: str) -> Iterator[Step]:
        """Model Blobs.create_exclusive."""
        log, want = _log(world, life.store), life.want
        assert want is not None
        if len(log) != life.seq + 1 or (want.change and log[-1].uid.split(".")[0] != life.name):
            yield f"{life.name} finds another's record", _live(world, i, life._replace(at=beaten))
            return
        made = _with_log(world, life.store, (*log, want))
        if want.change:
            arena = self._arena(made, life)
            made = self._with_arena(made, life, arena._replace(basis=want.uid, before=arena.basis))
        yield f"{life.name} creates {want.uid}", _live(made, i, life._replace(seq=life.seq + 1, at=then))

    def _check(self, world: World, i: int, life: Life) -> Iterator[Step]:
        """Model kinship.take and LocalSaver.open: copies in memory are used, or set aside."""
        newest, arena = _log(world, life.store)[-1], self._arena(world, life)
        kin = self._kin(arena, newest)
        used = arena.content if kin and _extends(arena.content, newest.content) else newest.content
        real, own = _change(world, life.store), dict(world.arenas).get((life.host, life.store), Arena())
        memory = own.content if _extends(own.content, newest.content) else ()
        if used != newest.content and (used != memory or real not in (own.basis, own.before)):
            raise Broken(f"{life.name} resumes {used}, and the store has {newest.content}")
        if own.basis == real and len(memory) > len(used):
            raise Broken(f"{life.name} resumes {used}, and had {memory} in memory")
        mine = Arena(newest.line, newest.line, used, real)
        made = self._with_arena(world, life, mine)
        yield f"{life.name} resumes {len(used)} steps", _live(made, i, life._replace(content=used, at=""))

    def _check_again(self, world: World, i: int, life: Life) -> Iterator[Step]:
        newest, arena = _log(world, life.store)[-1], self._arena(world, life)
        if not self._kin(arena, newest) and self.mutant != "a process that opens again does not look":
            yield f"{life.name} is fenced", _live(world, i, life._replace(at="over"))
            return
        if arena.basis != _change(world, life.store):
            raise Broken(f"{life.name} goes on, and others have saved")
        yield f"{life.name} goes on", _live(world, i, life._replace(at=""))

    def _kin(self, arena: Arena, newest: Rec) -> bool:
        if self.mutant == "arenas are believed whatever the store says":
            return True
        return newest.line in (arena.line, arena.next_line)

    def _step(self, world: World, i: int, life: Life) -> Iterator[Step]:
        """Model an iteration, and its checkpoint into the arena."""
        content = (*life.content, f"{life.name}.{life.count}")
        made = self._with_arena(world, life, self._arena(world, life)._replace(content=content))
        yield f"{life.name} trains", _live(made, i, life._replace(content=content, count=life.count + 1))

    def _commit(self, world: World, i: int, life: Life) -> Iterator[Step]:
        yield self._expect(world, i, life, life.content)

    def _back(self, world: World, i: int, life: Life) -> Iterator[Step]:
        """Model a rollback up to its first commit; the arena has its copies before the record exists."""
        changes = [rec for rec in _log(world, life.store) if rec.change]
        base = changes[min(1, len(changes) - 1)].content
        made = self._with_arena(world, life, self._arena(world, life)._replace(content=base))
        yield self._expect(made, i, life._replace(content=base), base)

    def _expect(self, world: World, i: int, life: Life, content: Content) -> Step:
        """Model StoreWriter before it creates a record: Companion.expect."""
        uid = f"{life.name}.{life.count}"
        arena = self._arena(world, life)
        if self.mutant != "the record under way is not announced":
            arena = arena._replace(next_line=uid)
        made = self._with_arena(world, life, arena)
        life = life._replace(want=Rec(uid, uid, content, True), at="put_change", count=life.count + 1)
        return f"{life.name} announces {uid}", _live(made, i, life)

    def _note(self, world: World, i: int, life: Life) -> Iterator[Step]:
        """Model Companion.note. Training does not wait for it."""
        assert life.want is not None
        if life.content == life.want.content:
            yield from self._step(world, i, life)
        line = life.want.line
        arena = self._arena(world, life)._replace(line=line, next_line=line, before="")
        yield f"{life.name} notes it", _live(self._with_arena(world, life, arena), i, life._replace(at=""))

    # -- what else happens to a store --------------------------------------------------------------------------

    def _prune(self, world: World, i: int, life: Life) -> Iterator[Step]:
        """Model compaction by the writer itself, or by the command, which is then the writer."""
        log = _log(world, life.store)
        uid = f"{life.name}.{life.count}"
        line = uid if self.mutant == "compaction begins a line" else log[-1].line
        made = _with_log(world, life.store, (*log, Rec(uid, line, log[-1].content, False)))
        life = life._replace(count=life.count + 1, seq=len(log) if life.seq >= 0 else -1, at="")
        if life.host != "x" and log[-1].uid.split(".")[0] != life.name:
            yield f"{life.name} is fenced", _live(world, i, life._replace(at="over"))
        else:
            yield f"{life.name} compacts", _live(made, i, life)

    def _copy(self, world: World, i: int, life: Life) -> Iterator[Step]:
        yield "it is copied", _live(_with_log(world, "copy", _log(world, life.store)), i, life)

    def _backup(self, world: World, i: int, life: Life) -> Iterator[Step]:
        yield "it is backed up", _live(_with_log(world, "backup", _log(world, life.store)), i, life)

    def _restore(self, world: World, i: int, life: Life) -> Iterator[Step]:
        """Model a restored backup while no process writes: files under a live writer must not be replaced."""
        if all(other.at == "over" or other.seq < 0 for other in world.lives):
            yield "its backup is put back", _live(_with_log(world, "run", _log(world, "backup")), i, life)

    def _arena(self, world: World, life: Life) -> Arena:
        return dict(world.arenas).get(self._key(life), Arena())

    def _with_arena(self, world: World, life: Life, arena: Arena) -> World:
        # Also under the key that no mutant uses: the real history.
        own = {self._key(life): arena, (life.host, life.store): arena}
        return world._replace(arenas=tuple(sorted({**dict(world.arenas), **own}.items())))


def _log(world: World, store: str) -> tuple[Rec, ...]:
    return dict(world.logs).get(store, ())


def _with_log(world: World, store: str, log: tuple[Rec, ...]) -> World:
    return world._replace(logs=tuple(sorted({**dict(world.logs), store: log}.items())))


def _live(world: World, i: int, life: Life) -> World:
    return world._replace(lives=(*world.lives[:i], life, *world.lives[i + 1 :]))


def _change(world: World, store: str) -> str:
    return next(rec.uid for rec in reversed(_log(world, store)) if rec.change)


def _extends(content: Content, other: Content) -> bool:
    return content[: len(other)] == other


def explore(scenario: Scenario, mutant: str = "") -> Result:
    """Return the number of reachable states, or the shortest way to a broken one."""
    model = Model(mutant)
    return search(model.begin(scenario), model.steps)
