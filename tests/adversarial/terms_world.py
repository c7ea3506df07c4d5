"""Keep the state of the model in `tests.adversarial.terms_model`: files, memories, processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

Term = tuple[int, str]
"""A term's number and its random id: `terms/<number>`, with the id as content."""
Place = tuple[int, str, int]
"""Where a record is: its term's number and id, and its own number."""
Line = tuple[str, int]
"""The id of a term, and the number of its newest record that has changed the state."""
NO_LINE: Line = ("", 0)
Uid = tuple[str, int]
Content = tuple[str, ...]
"""What has happened to a state: "0a.3" has changed row 0 on host a, and is its change 3; "back" is a roll-back."""
Segment = tuple[int, str, int, str]
"""The term's number, two parts that stand for a random name, and the value of one row."""
Table = tuple[Segment | None, Segment | None]
ROWS = (0, 1)


@dataclass(frozen=True, eq=False)
class Rec:
    """A record: "full", "delta", or "end", which closes the log of a term."""

    uid: Uid
    kind: str
    change: tuple[tuple[int, Segment | None], ...] = ()
    """What the file says: all rows, if it is full."""
    line: Line = NO_LINE
    seal: Place | None = None
    """The newest consistent state: this record itself, or an older one. It is a full record."""
    table: Table = (None, None)
    """What the record means. Of a delta, only the conditions know."""
    content: Content = ()
    past: frozenset[Uid] = frozenset()
    """The records on which this one builds: only the conditions know, as with `content`."""

    def __post_init__(self) -> None:
        # Worlds are compared by their hashes, many times.
        object.__setattr__(self, "_key", hash(tuple(vars(self).values())))

    def __hash__(self) -> int:
        return int(vars(self)["_key"])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rec) and vars(self) == vars(other)


class Store(NamedTuple):
    """The files at one address."""

    terms: frozenset[Term] = frozenset()
    recs: frozenset[tuple[Place, Rec]] = frozenset()
    ends: frozenset[tuple[Term, int]] = frozenset()
    """Where records are not created exclusively: the last number of a term that counts."""
    segments: frozenset[Segment] = frozenset()
    snapshots: frozenset[tuple[Place, bool]] = frozenset()
    """True: its creator has looked, and promises it."""
    flying: frozenset[tuple[Any, ...]] = frozenset()
    """Requests whose sender has given up waiting: each arrives later, or never."""
    # What only the conditions know.
    acknowledged: frozenset[Uid] = frozenset()
    settled: frozenset[Uid] = frozenset()
    """Records that a reader has returned as settled."""
    age: tuple[int, int] = (0, 0)
    """How often the store was removed, and put back."""
    lost: frozenset[Segment] = frozenset()
    """Segments that were not in the backup: what is put right afterwards may name them, and is damaged."""
    restored: frozenset[Uid] = frozenset()
    """Records that were in the backup."""


class Word(NamedTuple):
    """What a memory notes of one target. `told` and `age` are only for the conditions."""

    own: Line = NO_LINE
    """The id of its term, and its newest acknowledged record that has changed the state; 0: none yet."""
    base: Line = NO_LINE
    """The line on which it has opened the target, until that first record."""
    told: Content = ()
    """What the caller knows to be in the target."""
    age: tuple[int, int] = (0, 0)


class Memory(NamedTuple):
    """The copies in one host's memory, which outlive a process."""

    life: int = 0
    content: Content = ()
    made: int = 0
    """The counter of changes."""
    ready: bool = False
    """This life's process has decided what the content is."""
    beside: int = 0
    """Steps that training may make at any moment."""
    words: tuple[Word, Word] = (Word(), Word())
    durable: tuple[int, int] = (-1, -1)
    """One word for all targets: for a mutant."""


class Process(NamedTuple):
    """A process: `at` is its next step, `todo` what comes after."""

    name: str
    at: str
    todo: tuple[str, ...] = ()
    host: int = 0
    path: int = 0
    life: int = 0
    """0: it is the only one of its host."""
    of: int = -1
    """The process of which it becomes a clone."""
    second: bool = False
    """It saves to a second target, and does not decide what memory has."""
    lossy: int = 0
    """How many answers may be lost."""
    stale: int = 0
    """How many listings may hide newer terms."""
    zombie: bool = False
    """Its training process was killed; it ends with what it has begun."""
    tries: int = 3
    back: bool = False
    age: tuple[int, int] = (0, 0)
    term: int = 0
    id: str = ""
    k: int = 0
    count: int = 0
    want: Rec | None = None
    tail: Rec | None = None
    """Its newest acknowledged record; at first the base."""
    base: Place | None = None
    damaged: frozenset[Segment] = frozenset()
    """Segments that it knows to be missing since its opening."""
    full: int = 0
    """The number of its newest acknowledged full record."""
    since: frozenset[Segment] = frozenset()
    """Segments that its records name, from that one on."""
    sealed: frozenset[Segment] = frozenset()
    """Segments of the newest consistent state."""
    durable: tuple[int, int] = (-1, -1)
    """For each row, the change that is in the target."""
    x: Term = (0, "")
    s: int = 0
    work: tuple[Any, ...] = ()
    known: frozenset[Place] | None = None
    ghost: frozenset[Uid] = frozenset()
    settled: bool = False
    missed: tuple[Any, ...] = ()


class World(NamedTuple):
    stores: tuple[Store, Store]
    memories: tuple[Memory, ...]
    processes: tuple[Process, ...]
    backup: Store | None = None


@cache
def values(content: Content) -> tuple[str, str]:
    """Return the value of each row: the last change of it, "" if there is none."""
    found = [next((one for one in reversed(content) if one[0] == str(row)), "") for row in ROWS]
    return found[0], found[1]


def version(value: str) -> int:
    """Return the number of a change, which another host may have used for another one."""
    return int(value.split(".")[1]) if value else 0


def versions(content: Content) -> tuple[int, int]:
    first, second = values(content)
    return version(first), version(second)


def begins(content: Content, start: Content) -> bool:
    return content[: len(start)] == start


def names(table: Iterable[Segment | None]) -> frozenset[Segment]:
    return frozenset(one for one in table if one is not None)


def over(p: Process) -> Process:
    return Process(p.name, "over", host=p.host, life=p.life)


def onward(p: Process) -> Process:
    """Return the process at its next word."""
    if not p.todo:
        return over(p)
    return p._replace(at=p.todo[0], todo=p.todo[1:], x=(0, ""), s=0, work=())
