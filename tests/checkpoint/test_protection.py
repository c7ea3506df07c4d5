"""Test which copies stay unchanged: those that the store reads and a waiting seal, until the store has stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from scarctl.arena.arena import Arena
from scarctl.arena.queue import HandOverQueue
from scarctl.checkpoint.protection import Protection
from scarctl.state.layout import TensorSpec, build_layout
from scarctl.state.version import pack

EVERYTHING = np.arange(8)
WHOLE = "ab" * 16


class Desk:
    """An arena with eight partitions, its queue, and a clock that is set by hand."""

    def __init__(self, folder: Path) -> None:
        layout = build_layout([("w", "parameter", (TensorSpec("", "F32", (8, 4)),))], rows={"*": 1})
        self.arena = Arena.create(folder / "run", layout, run_id="0" * 32, epoch=1)
        self.queue = HandOverQueue(self.arena.folder)
        self.now = 0.0
        self.protection = Protection(self.arena, self.queue, clock=lambda: self.now)

    def hand_over(self, ids: list[int], step: int, whole: str = "") -> int:
        at = np.array(ids, dtype=np.int64)
        self.arena.begin(at)
        self.arena.end(at, pack(1, step))
        number = self.queue.put(version=pack(1, step), ids=at, whole=whole, extras={"step": step})
        self.protection.queued(number, pack(1, step), sealed=bool(whole))
        return number

    def protected(self) -> list[int]:
        self.protection.look()
        return np.flatnonzero(self.protection.covers(self.arena.pending())).tolist()

    def pass_by(self, seconds: float, every: float = 0.1) -> list[list[int]]:
        """Check at regular times; return the protected partitions of each check."""
        found = []
        for _ in range(round(seconds / every)):
            self.now += every
            found.append(self.protected())
        return found


@pytest.fixture
def desk(arena_dir: Path) -> Iterator[Desk]:
    desk = Desk(arena_dir)
    yield desk
    desk.queue.clear()
    desk.arena.remove()


def test_what_waits_may_be_copied_again_and_what_is_read_may_not(desk: Desk) -> None:
    desk.hand_over([0, 1], 1)
    desk.hand_over([2, 3], 2)
    assert desk.protected() == []
    desk.arena.read_begins(pack(1, 2))
    desk.hand_over([4, 5], 3)
    assert desk.protected() == [0, 1, 2, 3]
    desk.arena.read_ends(2)
    assert desk.protected() == [], "the rest of the commit needs no copy"


def test_a_later_hand_over_takes_the_place_of_those_that_nobody_reads(desk: Desk) -> None:
    first = desk.hand_over([0, 1], 1)
    desk.arena.read_begins(pack(1, 1))
    desk.hand_over([2, 3], 2)
    last = desk.hand_over([2], 3)
    assert desk.queue.numbers() == [first, last]
    desk.arena.read_ends(first)
    again = desk.hand_over([5], 3)
    assert desk.queue.numbers() == [first, last, again], "of one step, it may be another state"


def test_a_seal_protects_everything_until_it_was_read(desk: Desk) -> None:
    number = desk.hand_over(EVERYTHING.tolist(), 1, WHOLE)
    assert desk.protected() == EVERYTHING.tolist()
    desk.arena.durable[:] = desk.arena.version
    assert desk.protected() == EVERYTHING.tolist(), "also what does not wait"
    desk.arena.read_begins(pack(1, 1))
    desk.arena.read_ends(number)
    assert desk.protected() == []


def test_a_store_that_reads_slowly_gets_what_it_reads(desk: Desk) -> None:
    desk.hand_over([0, 1], 1)
    desk.arena.read_begins(pack(1, 1))
    for _ in range(50):
        desk.arena.read_on()
        assert desk.pass_by(0.9) == [[0, 1]] * 9


def test_a_store_that_has_stopped_protects_nothing_and_its_patience_grows(desk: Desk) -> None:
    desk.hand_over([0, 1], 1)
    desk.arena.read_begins(pack(1, 1))
    found = desk.pass_by(3.0)
    kept = found.index([])
    assert 8 <= kept <= 11
    assert found == [[0, 1]] * kept + [[]] * (30 - kept), (
        "once given up, it stays so while the store stands still"
    )
    desk.arena.read_on()
    found = desk.pass_by(3.0)
    assert 18 <= found.index([]) <= 21
    desk.arena.read_on()
    assert 35 <= desk.pass_by(6.0).index([]) <= 41
    # Reading without a pause shortens it again.
    desk.arena.read_on()
    desk.pass_by(1.0)
    for _ in range(4):
        desk.arena.read_on()
        desk.pass_by(0.1)
    assert desk.pass_by(3.0).index([]) <= 11


def test_a_slow_loop_waits_for_two_of_its_own_checkpoints(desk: Desk) -> None:
    desk.hand_over([0, 1], 1)
    desk.arena.read_begins(pack(1, 1))
    found = desk.pass_by(200.0, every=10.0)
    assert found[:2] == [[0, 1]] * 2
    assert [] in found[2:5]


def test_a_seal_that_never_came_to_the_store_is_owed_once_the_store_has_time(desk: Desk) -> None:
    number = desk.hand_over(EVERYTHING.tolist(), 1, WHOLE)
    desk.pass_by(2.0)
    later = desk.hand_over([0], 2)
    assert not desk.protection.owes_seal(), "the store has something to do"
    assert desk.queue.numbers() == [later], "without its seal the first says nothing more than the second"
    desk.queue.remove(number)
    desk.queue.remove(later)
    assert desk.protection.owes_seal()
    assert not desk.protection.owes_seal()
    number = desk.hand_over(EVERYTHING.tolist(), 3, WHOLE)
    desk.queue.remove(number)
    desk.arena.seal(pack(1, 3))
    assert not desk.protection.owes_seal()
