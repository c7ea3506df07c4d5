"""Test an evacuation in the persister's thread, on the real clock. No test here asserts a speed."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from scarctl.persist.evacuated import Evacuated
from scarctl.persist.evacuation import before
from scarctl.persist.thread import PersisterThread
from tests.daemon.rig import Rig
from tests.support.throttled import ThrottledBlobs
from tests.support.waiting import wait_until

Stuck = tuple[PersisterThread, threading.Event, list[Evacuated]]


def test_the_thread_interrupts_what_it_saves_and_goes_on_after(rig: Rig) -> None:
    rig.save(rig.everything, 1, sealed=True)
    thread = PersisterThread(rig.persister)
    try:
        assert thread.drain(60)
        rig.save(rig.everything, 2, sealed=True)
        found = thread.evacuate(60.0)
        assert found.sealed
        assert found.safe
        rig.save(np.array([1, 2]), 3)
        thread.notify()
        assert thread.drain(60)
        assert thread.failure is None
    finally:
        thread.close()
    assert rig.stored()[0][[1, 2]].tolist() == [3, 3]
    assert 2 in rig.sealed()


def test_a_store_that_hangs_does_not_hold_the_caller(rig: Rig) -> None:
    rig.save(rig.everything, 1, sealed=True)
    throttled = ThrottledBlobs(rig.blobs, 1e12)
    rig.store.blobs = throttled  # type: ignore[assignment]
    throttled.stuck.set()
    thread = PersisterThread(rig.persister)
    try:
        found = thread.evacuate(0.5)
        assert found.lost_partitions == rig.layout.partitions
        assert found.error
        assert not found.safe
    finally:
        throttled.stuck.clear()
        assert thread.drain(60), "the thread is free again, and saves as usual"
        thread.close()
    assert set(rig.stored()[0]) == {1}


def test_a_thread_that_ends_meanwhile_ends_the_evacuation(rig: Rig) -> None:
    rig.save(rig.everything, 1, sealed=True)
    throttled = ThrottledBlobs(rig.blobs, 1e12)
    rig.store.blobs = throttled  # type: ignore[assignment]
    throttled.stuck.set()
    thread = PersisterThread(rig.persister)
    found: list[Evacuated] = []
    asking = threading.Thread(target=lambda: found.append(thread.evacuate(60.0)))
    asking.start()
    ending = threading.Thread(target=thread.close)
    ending.start()
    throttled.stuck.clear()
    ending.join()
    asking.join()
    assert len(found) == 1


@pytest.fixture
def stuck(rig: Rig) -> Iterator[Stuck]:
    """Yield a thread whose evacuation hangs in a write, the event that holds it up, and the list of its reports."""
    rig.save(rig.everything, 1, sealed=True)
    throttled = ThrottledBlobs(rig.blobs, 1e12)
    rig.store.blobs = throttled  # type: ignore[assignment]
    thread = PersisterThread(rig.persister)
    assert thread.drain(60)
    throttled.stuck.set()
    rig.save(rig.everything, 2, sealed=True)
    found: list[Evacuated] = []
    asking = ask(thread, found)
    wait_until(lambda: thread._busy)  # with the evacuation, or with the request, if it was still collecting
    yield thread, throttled.stuck, found
    throttled.stuck.clear()
    asking.join()
    thread.close()


def ask(thread: PersisterThread, found: list[Evacuated]) -> threading.Thread:
    asking = threading.Thread(target=lambda: found.append(thread.evacuate(100.0)))
    asking.start()
    return asking


def test_one_that_comes_during_another_ends_neither_early(stuck: Stuck) -> None:
    """Signals and commands may ask at once: each is answered when all is safe, as there is time for it."""
    thread, held, found = stuck
    others = [ask(thread, found) for _ in range(3)]
    wait_until(lambda: len(thread._evacuations) == 4)
    held.clear()
    for other in others:
        other.join()
    wait_until(lambda: len(found) == 4)
    assert [(one.safe, one.sealed) for one in found] == [(True, True)] * 4, found


def test_a_shorter_one_is_answered_in_time_and_the_longer_one_continues(stuck: Stuck, rig: Rig) -> None:
    thread, held, found = stuck
    short = thread.evacuate(0.3)
    assert not short.safe
    assert short.lost_partitions == rig.layout.partitions
    held.clear()
    wait_until(lambda: found)
    assert [(one.safe, one.sealed) for one in found] == [(True, True)]


def test_time_is_kept_for_the_report() -> None:
    assert before(100.0, 10.0) == 99.5
    assert before(100.0, 60.0) == 99.0
