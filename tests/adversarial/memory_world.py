"""Keep the state of the model in `tests.adversarial.memory_model`, and check what must hold at every moment."""

from __future__ import annotations

from typing import NamedTuple, TypeVar, overload

from tests.adversarial.search import Broken

ROWS = (0, 1)
Marks = frozenset[int]
"""Numbers, of rows for the most part."""
NONE: Marks = frozenset()
Item = TypeVar("Item")


class Row(NamedTuple):
    """A copy of one row: two halves, so that it can be torn. A value below zero is not finite."""

    version: int = 0
    """The moment at which these bytes were the row's new value; 0 while they are written."""
    low: int = 0
    high: int = 0


Rows = tuple[Row, Row]


class Slot(NamedTuple):
    moment: int
    name: int
    """The moment that the state is named after; 0 while it is written."""
    extras: int
    rows: Rows


class Hold(NamedTuple):
    number: int
    slot: int
    deadline: int
    """The last moment at which the copier respects it."""
    members: frozenset[tuple[int, int]]
    """The savers that read the slot: number and life."""


class Copy(NamedTuple):
    """The copier: `at` is "idle", "low", "high" or "version" of a row, "name", "stamp", "flip", or, in a
    mutant, "extras".
    """

    at: str = "idle"
    moment: int = 0
    left: tuple[int, ...] = ()
    taken: Marks = NONE
    changed: Marks = NONE
    """Rows that changed since the moment of the current slot."""


class Saver(NamedTuple):
    """The saver of one target: what it still has to do, and what it has in its segment."""

    todo: tuple[str, ...]
    at: str = "idle"
    life: int = 0
    slot: int = 0
    hold: int = 0
    deadline: int = 0
    left: tuple[int, ...] = ()
    segment: tuple[tuple[int, Row], ...] = ()
    moment: int = 0
    name: int = 0
    extras: int = 0
    looks: int = 0
    """Attempts to copy without a hold that were in vain."""
    since: int = 0
    """The moment of the slot when the look began."""
    seen: int = 0
    """The slot that is current, as the look has found it after the last byte."""

    @property
    def full(self) -> bool:
        """Whether the next turn is a full checkpoint."""
        return self.todo[0].startswith("full")


class Target(NamedTuple):
    rows: Rows = (Row(), Row())
    moment: int = 0
    """Of the full checkpoint that it has; 0 if its rows may be of several moments."""
    name: int = 0
    extras: int = 0


class Lost(NamedTuple):
    """A row was marked as lost: a copy not later than `before` is wanted; `best` is the newest when it was marked."""

    before: int
    best: int


class Told(NamedTuple):
    """What was true at one moment."""

    rows: tuple[int, int]
    extras: int
    step: int


class World(NamedTuple):
    todo: tuple[str, ...]
    savers: tuple[Saver, ...]
    targets: tuple[Target, ...]
    durable: tuple[tuple[int, int], ...]
    holds: tuple[Hold | None, ...] = (None,)
    live: tuple[int, int] = (1, 2)
    extras: int = 1
    step: int = 1
    due: str = ""
    """A memory checkpoint is due: "copy" or "flush"."""
    moment: int = 1
    """The counter of moments, a word in memory."""
    begun: int = 1
    """The newest moment that was not left out, a word in memory."""
    slots: tuple[Slot, Slot] = (Slot(1, 1, 1, (Row(1, 1, 1), Row(1, 2, 2))),) * 2
    current: int = 0
    marks: tuple[Marks, Marks] = (NONE, NONE)
    """For each slot the rows that changed since its moment."""
    copy: Copy = Copy()
    lost: Lost | None = None
    before: int = 0
    kills: int = 0
    deaths: int = 0
    taken: int = 0
    """Number of holds so far."""
    # What only the conditions know.
    fresh: int = 2
    flipped: int = 1
    waited: int = 0
    flushed: bool = False
    dropped: Marks = NONE
    """Moments that a restart has given up."""
    history: tuple[Told, ...] = (Told((1, 2), 1, 1),)


Step = tuple[str, World]


@overload
def put(items: tuple[Item, Item], i: int, item: Item) -> tuple[Item, Item]: ...
@overload
def put(items: tuple[Item, ...], i: int, item: Item) -> tuple[Item, ...]: ...
def put(items: tuple[Item, ...], i: int, item: Item) -> tuple[Item, ...]:
    """Return the items with another one in place `i`."""
    return (*items[:i], item, *items[i + 1 :])


def with_saver(world: World, k: int, saver: Saver) -> World:
    """Return the world with another state of saver `k`."""
    return world._replace(savers=put(world.savers, k, saver))


def check(world: World) -> None:
    """Raise Broken unless a restart, every target and every word in memory are right, now."""
    slot = world.slots[world.current]
    told = world.history[slot.moment - 1]
    for i in ROWS:
        row = slot.rows[i]
        if row.low != row.high:
            raise Broken(f"a restart finds row {i} torn")
        if row.high != told.rows[i]:
            raise Broken(f"a restart at moment {slot.moment} finds row {i} of another moment")
        if row.high < 0:
            raise Broken(f"a restart finds row {i} not finite")
    if slot.name != slot.moment:
        raise Broken(f"a restart finds moment {slot.moment} under the name of {slot.name}")
    if slot.extras != told.extras:
        raise Broken(f"a restart at moment {slot.moment} finds extras of another moment")
    if slot.moment < world.flipped:
        raise Broken(f"a restart finds moment {slot.moment}, and {world.flipped} was complete")
    if world.waited > 1:
        raise Broken(f"{world.waited} moments in a row were left out because of a hold")
    for number, target in enumerate(world.targets):
        _check_target(world, number, target)


def _check_target(world: World, number: int, target: Target) -> None:
    saver, current = world.savers[number], world.slots[world.current]
    told = world.history[target.moment - 1] if target.moment else None
    for i in ROWS:
        row, known = target.rows[i], world.durable[number][i]
        if row.low != row.high:
            raise Broken(f"target {number} has row {i} torn")
        if row.high < 0:
            raise Broken(f"target {number} has row {i} not finite")
        if told and row.high != told.rows[i]:
            raise Broken(f"target {number} calls moment {target.moment} full, and row {i} is of another")
        for slot in world.slots if saver.at not in ("durable", "start") else (current,):
            if slot.rows[i].version == known > 0 and slot.rows[i].high != row.high:
                raise Broken(f"row {i} is called durable in target {number}, which has another value")
        again = current.rows[i].version != known and current.rows[i].high == row.high
        if again and saver.at == "idle" and not world.before:
            raise Broken(f"row {i} is pending for target {number}, which has it")
    if told and target.name != target.moment:
        raise Broken(f"target {number} calls moment {target.moment} full, under the name of {target.name}")
    if told and target.extras != told.extras:
        raise Broken(f"target {number} calls moment {target.moment} full, and its extras are of another")
