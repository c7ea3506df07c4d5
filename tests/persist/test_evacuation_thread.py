"""Test an evacuation in the persister's thread, on the real clock. No test here asserts a speed."""

from __future__ import annotations

import threading

import numpy as np

from scarctl.persist.evacuated import Evacuated
from scarctl.persist.evacuation import before
from scarctl.persist.thread import PersisterThread
from tests.daemon.rig import Rig
from tests.support.throttled import ThrottledBlobs


def test_the_thread_interrupts_what_it_saves_and_goes_on_after(rig: Rig) -> None:
    rig.save(rig.everything, 1, sealed=True)
    thread = PersisterThread(rig.persister, rig.queue)
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
    assert all(2 in steps for steps in rig.sealed())


def test_a_store_that_hangs_does_not_hold_the_caller(rig: Rig) -> None:
    rig.save(rig.everything, 1, sealed=True)
    throttled = ThrottledBlobs(rig.blobs, 1e12)
    rig.store.blobs = rig.writer._blobs = throttled  # type: ignore[assignment]
    throttled.stuck.set()
    thread = PersisterThread(rig.persister, rig.queue)
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
    rig.store.blobs = rig.writer._blobs = throttled  # type: ignore[assignment]
    throttled.stuck.set()
    thread = PersisterThread(rig.persister, rig.queue)
    found: list[Evacuated] = []
    asking = threading.Thread(target=lambda: found.append(thread.evacuate(60.0)))
    asking.start()
    ending = threading.Thread(target=thread.close)
    ending.start()
    throttled.stuck.clear()
    ending.join()
    asking.join()
    assert len(found) == 1


def test_time_is_kept_for_the_report() -> None:
    assert before(100.0, 10.0) == 99.5
    assert before(100.0, 60.0) == 99.0
