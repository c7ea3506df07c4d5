"""Test what of an owner's queue its replica has: the moment, and hand-overs without rows of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from scarctl.arena.queue import HandOverQueue
from scarctl.arena.staged import copy_out
from scarctl.state.version import pack
from tests.peers.test_replica import EVERYTHING, RUN, Run, equal

pytestmark = pytest.mark.leaves_arena


def test_another_hand_over_under_the_same_number_is_sent(tmp_path: Path) -> None:
    """A process that died had put the newest hand-over; it was saved, and the daemon numbers again."""
    run = Run(tmp_path)
    run.seal()
    run.copy(EVERYTHING[:2])
    run.hand_over(EVERYTHING[:2])
    assert run.send()
    for number in run.queue.numbers():
        run.queue.remove(number)
    run.copy(EVERYTHING[2:4])
    again = HandOverQueue(run.arena.folder)
    number = again.put(version=pack(1, run.step), ids=EVERYTHING[2:4], extras={"step": run.step})
    assert number == 1
    assert run.send()
    (found,) = HandOverQueue(run.host / RUN).pending()
    assert found.extras == {"step": run.step}
    run.check()


def test_a_seal_that_was_withdrawn_is_withdrawn_on_the_peer(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.seal()
    assert run.send()
    run.queue.unseal()
    assert run.send()
    assert [handover.sealed for handover in HandOverQueue(run.host / RUN).pending()] == [False]


def test_what_was_set_aside_stays_on_its_host_and_the_moment_goes_with_the_copies(tmp_path: Path) -> None:
    """A peer gets memory, which is newer: rows that wait for this host's store would only take its room."""
    run = Run(tmp_path)
    run.moment(EVERYTHING)
    number = run.queue.put(
        version=pack(1, run.step),
        ids=EVERYTHING,
        whole=run.arena.whole,
        extras={"step": run.step},
        staged=copy_out(run.arena, EVERYTHING),
    )
    assert run.send()
    assert equal(run)
    there = HandOverQueue(run.host / RUN)
    assert there.numbers() == []
    assert not list((run.host / RUN).glob("*rows-*"))
    run.moment(EVERYTHING[:2])
    assert run.send()
    assert equal(run)
    noted = there.moment()
    assert noted is not None
    assert (noted.version, noted.extras) == (pack(1, 2), {"step": 2})
    run.queue.remove(number)
