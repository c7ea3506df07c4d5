"""Test an evacuation of a real arena into a real store: the order, the result of a cut, and the report."""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scarctl.errors import Corruption, Unavailable
from scarctl.persist import evacuation as evacuation_module
from scarctl.persist.evacuated import Evacuated, rework_of_all
from scarctl.persist.evacuation import Evacuation, not_evacuated
from scarctl.policy.evacuation import Pace
from scarctl.state.extras import Notes
from scarctl.state.layout import TensorSpec, build_layout
from scarctl.state.version import step_of
from scarctl.store import open_writer, verify
from tests.daemon.rig import Rig, copy_into
from tests.store.helpers import read_all
from tests.support.throttled import ThrottledBlobs

ROWS = 64
ROW = 64 << 10
"""Bytes of a partition, large compared with the fixed bytes of a commit."""
NONE = Notes()


class Clock:
    """A clock that advances only when the store is written to."""

    def __init__(self) -> None:
        self.now = 0.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self.now += seconds


class Slow(Rig):
    """A rig whose store writes 64 partitions in 32 s, on its own clock, plus half a second for every file."""

    def __init__(self, folder: Path, base: Path, *, shards: int = 2) -> None:
        layout = build_layout([("w", "parameter", (TensorSpec("", "U8", (ROWS, ROW)),))], rows={"w": 1})
        super().__init__(folder, base, shards=shards, layout=layout)
        self.clock = Clock()
        self.save(self.everything, 1, sealed=True)
        self.persist(1)
        self.throttled = ThrottledBlobs(self.blobs, 2 * ROW, seconds=0.1, sleep=self.clock.sleep)
        self.store.blobs = self.throttled  # type: ignore[assignment]

    def flush(
        self, step: int, unsaved: Any, *, sealed: bool = True, notes: Notes = NONE, **more: Any
    ) -> None:
        """Flush as a session does before an evacuation."""
        extras = {
            "step": step,
            "history": {"norm": "l2", "points": np.zeros((0, 3))},
            **notes.to_tree(),
            **more,
        }
        assert copy_into(
            self.arena,
            self.everything,
            self.version(step),
            step,
            whole=f"{step:032x}" if sealed else "",
            extras=extras,
            flush=True,
        )
        self.arena.reach(step)
        self.arena.note_distances(np.asarray(unsaved, dtype=np.float64))
        self.arena.ask(whole=True)

    def evacuate(self, seconds: float, **options: Any) -> Evacuated:
        """Evacuate, and return the report."""
        evacuation = self.evacuation(seconds, **options)
        evacuation.run()
        return evacuation.report()

    def evacuation(self, seconds: float, **options: Any) -> Evacuation:
        deadline = self.clock() + seconds
        return Evacuation(
            self.arena,
            self.persister,
            deadline,
            clock=self.clock,
            sleep=self.clock.sleep,
            **options,
        )


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Slow]:
    made = Slow(tmp_path / "store", tmp_path)
    yield made
    made.close()


RISING = np.arange(ROWS) + 1.0


def test_what_fits_is_sealed_and_exact(slow: Slow) -> None:
    slow.flush(7, RISING)
    found = slow.evacuate(120.0)
    assert found.safe
    assert found.sealed
    assert found.lost_partitions == found.lost_bytes == found.squared == 0
    assert found.rework.iterations == 0.0
    assert set(slow.stored()[0]) == {7}
    assert 7 in slow.sealed()
    assert slow.extras()["step"] == 7
    assert found.commits > 3, "in small commits all the same"


@pytest.mark.parametrize("flush", [True, False])
def test_another_reader_of_an_earlier_state_does_not_keep_it_waiting(slow: Slow, flush: bool) -> None:
    """Without a flush, memory has a newer state than the one that a host is sent."""
    slow.copy(slow.everything, 6, whole=f"{6:032x}")
    with slow.arena.held(600.0) as other:
        slow.copy(slow.everything, 7, whole=f"{7:032x}", flush=flush)
        found = slow.evacuate(120.0)
        assert not other.lasts()
    assert found.safe
    assert 7 in slow.sealed()


def test_a_state_of_the_same_step_takes_as_long_as_its_extras(slow: Slow) -> None:
    """The step was flushed again, with nothing to copy."""
    slow.flush(7, RISING)
    slow.evacuation(120.0).run()
    slow.copy(slow.everything[:0], 7, whole=f"{8:032x}")
    found = slow.evacuate(20.0)
    assert found.safe
    assert found.sealed


@pytest.mark.parametrize("seconds", [3.0, 8.0, 15.0])
def test_what_does_not_fit_is_saved_in_the_order_of_change(slow: Slow, seconds: float) -> None:
    slow.flush(7, RISING)
    found = slow.evacuate(seconds)
    assert slow.clock() <= seconds
    steps, content = slow.stored()
    saved = np.flatnonzero(steps == 7)
    assert 0 < saved.size < ROWS
    assert saved.tolist() == list(range(ROWS - saved.size, ROWS)), "the largest changes, and no gap"
    assert set(content[saved]) == {7}
    assert found.lost_partitions == ROWS - saved.size
    assert found.squared == pytest.approx(float((RISING[: ROWS - saved.size] ** 2).sum()))
    assert (found.ages, found.counts, found.parameters) == ((6,), (found.lost_partitions,), ROWS)
    assert not found.safe
    assert not found.sealed
    assert slow.extras()["step"] == 7
    assert saved.size >= 0.4 * 2 * seconds, "much of what the store could have taken"
    assert verify(slow.store.again(), read_data=True).problems == []


def test_usual_saving_finishes_what_was_left(slow: Slow) -> None:
    slow.flush(7, RISING)
    slow.evacuation(8.0).run()
    slow.persist(slow.arena.asked)
    assert set(slow.stored()[0]) == {7}
    assert 7 in slow.sealed()


def test_a_cut_at_any_write_leaves_all_earlier_commits(slow: Slow) -> None:
    """As after SIGKILL, the store is checked in its state before every fourth write."""
    slow.flush(7, RISING)
    seen: list[int] = []
    passing, writes = slow.throttled.pass_through, itertools.count()

    def look(nbytes: int, seconds: float = 0.0) -> None:
        if next(writes) % 4 == 0:
            steps, _ = slow.stored()
            seen.append(int((steps == 7).sum()))
            assert set(steps) <= {1, 7}
        passing(nbytes, seconds)

    slow.throttled.pass_through = look  # type: ignore[method-assign]
    slow.evacuation(15.0).run()
    assert seen == sorted(seen)
    assert len(set(seen)) > 4, "it grows commit by commit"


def test_copies_of_several_steps_keep_theirs(slow: Slow) -> None:
    slow.copy(np.arange(0, 8), 3)
    slow.copy(np.arange(8, 16), 5)
    found = slow.evacuate(60.0)
    assert slow.stored()[0][:16].tolist() == [3] * 8 + [5] * 8
    assert found.safe
    assert not found.sealed, "it has no name"
    assert found.step == 5


def test_a_flush_meanwhile_is_what_is_saved(slow: Slow) -> None:
    slow.flush(7, RISING)
    passing, writes = slow.throttled.pass_through, itertools.count()

    def look(nbytes: int, seconds: float = 0.0) -> None:
        if next(writes) == 6:
            slow.flush(8, RISING)
        passing(nbytes, seconds)

    slow.throttled.pass_through = look  # type: ignore[method-assign]
    found = slow.evacuate(240.0)
    assert found.sealed
    assert set(slow.stored()[1]) == {8}


def test_what_the_store_lacks_goes_first(tmp_path: Path) -> None:
    rig = Slow(tmp_path / "store", tmp_path)
    rig.flush(2, RISING)
    lacking = rig.persister.stored()
    lacking[[3, 5]] = -1
    rig.persister.stored = lambda: lacking  # type: ignore[method-assign]
    rig.evacuate(4.0)
    saved = np.flatnonzero(rig.stored()[0] == 2)
    assert {3, 5} <= set(saved.tolist())
    rig.close()


def test_extras_too_large_for_a_commit_do_not_keep_partitions_from_it(slow: Slow) -> None:
    slow.flush(7, RISING, large=np.zeros(20 * ROW, dtype=np.uint8))
    slow.evacuate(10.0)
    assert slow.clock() <= 10.0
    assert (slow.stored()[0] == 7).sum() >= 6
    assert slow.extras()["step"] == 1
    for _ in range(20):  # each leaves time for copies, never for the extras
        found = slow.evacuate(6.0)
        if not found.lost_partitions:
            break
    assert set(slow.stored()[0]) == {7}
    assert slow.extras()["step"] == 1
    assert (found.lost_partitions, found.extras_lost, found.safe) == (0, True, False)
    rest = slow.evacuate(500.0)
    assert (rest.sealed, rest.safe) == (True, True)
    assert slow.extras()["step"] == 7


def test_extras_that_fit_no_commit_are_lost_until_they_are_saved(slow: Slow) -> None:
    """Also in the evacuations after the one that saves the last copies, and in usual saving between them."""
    slow.flush(7, RISING, sealed=False, large=np.zeros(20 * ROW, dtype=np.uint8))
    for _ in range(20):
        found = slow.evacuate(6.0)
        if not found.lost_partitions:
            break
    assert slow.extras()["step"] == 1
    earlier = Pace()
    earlier.add(2 * ROW, 1.0)
    earlier.add(8 * ROW, 4.0)
    for _ in range(2):
        found = slow.evacuate(6.0, earlier=earlier)
        assert (found.lost_partitions, found.extras_lost, found.safe) == (0, True, False)
    assert slow.persist(slow.arena.asked) == 0, "all copies are durable"
    assert slow.extras()["step"] == 7
    assert slow.evacuation(0.0).report().safe


def test_extras_that_cannot_be_read_say_nothing(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    slow.flush(7, RISING)
    read = evacuation_module.read_extras

    def fails(*_: Any) -> Any:
        raise Unavailable("away")

    monkeypatch.setattr(evacuation_module, "read_extras", fails)
    found = slow.evacuation(0.0).report()
    assert (found.extras_lost, found.safe, found.error) == (True, False, "away")
    monkeypatch.setattr(evacuation_module, "read_extras", read)


def test_a_deadline_that_is_over_writes_nothing(slow: Slow) -> None:
    slow.flush(7, RISING)
    records = slow.records()
    for seconds in (0.0, -5.0):
        found = slow.evacuate(seconds)
        assert found.lost_partitions == ROWS
    assert slow.records() == records
    assert slow.clock() == 0.0


def test_a_fault_that_passes_is_retried_and_one_that_lasts_ends_in_time(slow: Slow) -> None:
    slow.flush(7, RISING)
    slow.blobs.fail("commit", errno.EIO, at=(1, 2))
    found = slow.evacuate(120.0)
    assert found.sealed
    assert found.error is None
    slow.flush(8, RISING)
    slow.blobs.break_down("writer", errno.ENOSPC)
    began = slow.clock()
    found = slow.evacuate(10.0)
    assert slow.clock() - began <= 10.0
    assert "No space left" in (found.error or "")
    assert found.lost_partitions == ROWS
    slow.blobs.mend()


def test_a_fenced_writer_ends_at_once_and_says_why(slow: Slow) -> None:
    slow.flush(7, RISING)
    other = slow.writer.store.again()
    Path(other.blobs.where("lock")).unlink()  # as if on another host
    open_writer(other, layout=slow.layout).close()
    found = slow.evacuate(120.0)
    assert "taken over" in (found.error or "")
    assert slow.clock() < 60


def test_a_report_survives_its_way_between_processes(slow: Slow) -> None:
    slow.flush(7, RISING)
    found = slow.evacuate(5.0)
    assert Evacuated.from_json(found.to_json()) == found
    for bad in (None, {}, {**found.to_json(), "ages": None}):
        with pytest.raises(Corruption):
            Evacuated.from_json(bad)


def test_a_saver_out_of_reach_still_gives_a_report(slow: Slow) -> None:
    slow.flush(7, RISING)
    found = not_evacuated(slow.arena, Unavailable("no daemon"))
    assert (found.lost_partitions, found.error) == (ROWS, "no daemon")
    assert found.squared == pytest.approx(float((RISING**2).sum()))


def test_rework_of_several_ranks_is_of_all_that_they_lose() -> None:
    points = tuple((float(k), 1.0, 0.9**k) for k in range(40))
    one = Evacuated(40, 10, 100, 0, 0, 5, 50, 0.01, False, (4,), (5,), 10, points)
    none = Evacuated(40, 10, 100, 100, 1, 0, 0, 0.0, True, (), (), 10, points)
    alone, both = rework_of_all([one]), rework_of_all([one, none])
    assert alone.iterations is not None
    assert both.iterations is not None
    assert 0 < both.iterations < alone.iterations
    assert rework_of_all([none, none]).iterations == 0.0
    assert (
        rework_of_all([Evacuated(40, 10, 100, 0, 0, 5, 50, None, False, (4,), (5,), 10, points)]).basis
        == "ages"
    )


@pytest.mark.parametrize(("waiting", "large"), [(False, 0), (True, 0), (True, 1 << 20)])
def test_what_the_store_has_in_fewer_bits_is_saved_exactly(tmp_path: Path, waiting: bool, large: int) -> None:
    """Also copies that are older than the newest commit, and of a process that is dead: nobody hands over a seal.

    large: bytes of the newest extras, which may fit no commit of copies.
    """
    layout = build_layout([("w", "parameter", (TensorSpec("", "F32", (64, 16)),))], rows={"w": 1})
    rig = Rig(tmp_path / "store", tmp_path, shards=2, layout=layout)
    rig.arena.note_encoding("int8")
    for step, every in ((1, 1), (2, 2), (3, 4)):
        ids = rig.everything[::every]
        extras = {"step": step, "large": np.zeros(large * (step == 3), dtype=np.uint8)}
        assert copy_into(rig.arena, ids, rig.version(step), step + 64, extras=extras)
        number = rig.arena.ask(ids=ids) if step == 3 else rig.arena.ask(encoded=ids)
        if step < 3 or not waiting:
            rig.persist(number)
    lossy = int((rig.arena.encoding_error >= 0).sum())
    assert lossy == 64 if waiting else 48
    clock = Clock()
    leaving = Evacuation(rig.arena, rig.persister, 60.0, clock=clock, sleep=clock.sleep)
    assert (leaving.report().lost_partitions, leaving.report().safe) == (lossy, False)
    leaving.run()
    report = leaving.report()
    assert (report.lost_partitions, report.safe, report.error) == (0, True, None)
    assert rig.extras()["step"] == 3
    state = rig.store.state(0)
    assert not state.encoded.any()
    found, bad = read_all(rig.store, state)
    assert not bad
    for i, data in found.items():
        assert data == rig.arena.rows(0, 0)[i].tobytes()
    assert np.array_equal(step_of(state.version), step_of(rig.arena.version[state.ids]))
    assert verify(rig.store, read_data=True).intact
    rig.die()
