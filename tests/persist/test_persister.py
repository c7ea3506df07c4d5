"""Test requests to a real store: acknowledged copies are there, others are pending, sealed states are of one moment."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scarctl.arena.header import FILE
from scarctl.arena.slots import LEAST_HOLD, Slots
from scarctl.errors import AccessDenied, Fenced, Overwritten, ScarError, Unavailable
from scarctl.persist import persister as module
from scarctl.persist.thread import PersisterThread
from scarctl.policy.evacuation import Pace
from tests.daemon.rig import Rig
from tests.support.faulty import OPERATIONS

SOME = np.array([0, 3, 4, 11, 18])


@pytest.fixture(params=["copied", "held"])
def private(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return whether a whole state is copied into a private buffer, or its slot is held while it is written."""
    if request.param == "held":
        monkeypatch.setattr(module, "PRIVATE", 0)
        monkeypatch.setattr(module, "PARTS", 1 << 40)
    return str(request.param)


def test_a_part_becomes_durable_and_is_acknowledged(rig: Rig) -> None:
    number = rig.save(SOME, 7)
    assert rig.arena.pending().nonzero()[0].tolist() == SOME.tolist()
    assert rig.persist(number) == rig.layout.partition_bytes[SOME].sum()
    assert not rig.arena.pending().any()
    assert rig.arena.served == number
    steps, content = rig.stored()
    assert set(steps[SOME]) == set(content[SOME]) == {7}
    assert (np.delete(steps, SOME) == -1).all()
    assert rig.extras() == {"step": 7}


def test_a_whole_state_is_sealed(rig: Rig, private: str) -> None:
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    rig.persist(rig.save(SOME[:1], 2, sealed=True))
    assert rig.sealed() == {1, 2}
    steps, content = rig.stored()
    assert (steps == 2).all()
    assert content[SOME[0]] == 2
    assert (np.delete(content, SOME[0]) == 1).all()
    assert not rig.arena.lacking()


def test_a_state_in_which_nothing_has_changed_is_a_newer_step(rig: Rig) -> None:
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    assert rig.persist(rig.save(SOME[:0], 5, sealed=True)) == 0
    assert rig.sealed() == {1, 5}
    assert rig.extras() == {"step": 5}
    records = rig.records()
    rig.persist(rig.arena.ask(whole=True))
    assert rig.records() == records, "the store has it"


def test_one_commit_serves_all_requests_with_the_newest_copies(rig: Rig) -> None:
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    rig.save(SOME, 2)
    newest = rig.save(SOME[:2], 3)
    rig.persist(newest)
    steps, content = rig.stored()
    assert steps[SOME].tolist() == content[SOME].tolist() == [3, 3, 2, 2, 2]
    assert rig.records() == 2
    assert not rig.arena.waits


def test_only_what_was_chosen_is_saved(rig: Rig) -> None:
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    rig.copy(rig.everything, 2)
    rig.persist(rig.arena.ask(ids=SOME))
    assert np.flatnonzero(rig.stored()[1] == 2).tolist() == SOME.tolist()
    rig.persist(rig.arena.ask(ids=SOME[:2]))
    assert rig.records() == 2, "the store has these"


def test_values_that_changed_without_a_step_are_saved_again(rig: Rig) -> None:
    """Weights are swapped after the loop (an average) before the session's closing checkpoint."""
    rig.persist(rig.save(rig.everything, 5, sealed=True))
    rig.persist(rig.save(SOME, 5, sealed=True, value=77))
    steps, content = rig.stored()
    assert set(content[SOME]) == {77}
    assert (steps == 5).all()
    assert not rig.arena.lacking()


def test_a_state_that_is_held_is_as_it_was(rig: Rig, private: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training leaves out a moment for it if its rows are read while they are written."""
    number = rig.save(rig.everything, 2, sealed=True)
    commit, left_out = rig.writer.commit, list[bool]()

    def committing(*args: Any, **kwargs: Any) -> Any:
        rig.copy(rig.everything, 3)
        left_out.append(rig.arena.begin_moment() is None)
        return commit(*args, **kwargs)

    monkeypatch.setattr(rig.writer, "commit", committing)
    rig.persist(number)
    assert left_out == [private == "held"]
    assert rig.sealed() == {2}
    assert set(rig.stored()[1]) == {2}
    assert rig.arena.pending().all(), "memory has newer ones"


def test_a_flush_ends_the_hold_and_the_newest_state_is_saved(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PRIVATE", 0)
    monkeypatch.setattr(module, "PARTS", 1 << 40)
    number = rig.save(rig.everything, 2, sealed=True)
    commit, flushed = rig.writer.commit, list[int]()

    def committing(ids: Any, source: Any, **kwargs: Any) -> Any:
        def reading(*at: int) -> Any:
            if not flushed:
                flushed.append(1)
                for step in (3, 4):
                    copied = rig.arena.begin_moment(flush=True)
                    assert copied is not None
                    rig.arena.flip(copied[0], copied[1], rig.version(step), "")
                rig.save(rig.everything, 5, sealed=True)
            return source(*at)

        return commit(ids, reading, **kwargs)

    monkeypatch.setattr(rig.writer, "commit", committing)
    rig.persist(number)
    assert rig.sealed() == {5}
    assert set(rig.stored()[1]) == {5}


class Training:
    """Makes a memory checkpoint within each commit, which ends its hold."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch, changes: Any) -> None:
        self.rig, self.commit, self.changes, self.sizes = rig, rig.writer.commit, changes, list[int]()
        monkeypatch.setattr(rig.writer, "commit", self.committing)

    def committing(self, ids: Any, *args: Any, **kwargs: Any) -> Any:
        self.sizes.append(int(self.rig.layout.partition_bytes[ids].sum()))
        step = 2 + len(self.sizes)
        self.rig.copy(self.changes, step, whole=f"{step:032x}", flush=True)
        return self.commit(ids, *args, **kwargs)


class Slow(Pace):
    """The pace of a store in which nothing is ever saved in time."""

    def seconds(self, nbytes: int) -> float:
        return 1e9


@pytest.mark.parametrize("known", [False, True])
def test_what_is_saved_before_a_hold_is_lost_is_kept_and_the_rest_is_sealed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """The first commit of a large state, which a hold would have to outlast. known: whether that is known before."""
    monkeypatch.setattr(module, "PRIVATE", 200)
    monkeypatch.setattr(module, "PARTS", 1 << 40)
    number = rig.save(rig.everything, 2, sealed=True)
    if known:
        rig.persister.pace = Slow()
    training = Training(rig, monkeypatch, SOME[:2])
    assert rig.persist(number) < 1.5 * rig.layout.nbytes
    lost, pieces = training.sizes[: not known], training.sizes[not known :]
    assert lost == [rig.layout.nbytes] * len(lost), "the slot is not even held if that cannot be long enough"
    assert max(pieces) <= 200
    assert len(pieces) > 5
    assert len(rig.sealed()) == 1
    steps, content = rig.stored()
    assert (steps == max(rig.sealed())).all(), "all of it is of one step"
    assert set(np.delete(content, SOME[:2])) == {2}


def test_a_short_hold_of_another_reader_is_waited_for(
    rig: Rig, private: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, left = rig.save(rig.everything, 2, sealed=True), list[float]()
    commit = rig.persister.commit

    def committing(hold: Any, *args: Any, **kwargs: Any) -> Any:
        if private == "held":
            left.append(hold.seconds)
        return commit(hold, *args, **kwargs)

    monkeypatch.setattr(rig.persister, "commit", committing)
    with rig.arena.held(0.1):
        rig.persist(number)
    assert rig.sealed() == {2}
    assert all(seconds > LEAST_HOLD / 2 for seconds in left)
    assert len(left) == (private == "held")


def test_a_state_that_changes_faster_than_it_is_written_is_saved_in_parts(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PRIVATE", 200)
    monkeypatch.setattr(module, "PARTS", 1 << 40)
    number = rig.save(rig.everything, 2, sealed=True)
    rig.persister.pace = Slow()
    training = Training(rig, monkeypatch, rig.everything)
    with pytest.raises(Overwritten, match="keeps changing") as caught:
        rig.persist(number)
    assert caught.value.retryable
    assert sum(training.sizes) == rig.layout.nbytes, "each partition once"
    assert rig.arena.waits
    assert (rig.stored()[0] >= 2).all(), "the store has copies of all partitions"
    training.changes = SOME[:0]
    rig.persist(number)
    assert rig.sealed(), "it stands still now"


def test_parts_are_copied_in_pieces(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PRIVATE", 200)
    monkeypatch.setattr(module, "PARTS", 1 << 40)
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    training = Training(rig, monkeypatch, SOME[:0])
    rig.arena.note_distances(np.arange(rig.layout.partitions)[::-1].astype(np.float64))
    assert rig.persist(rig.save(rig.everything, 2)) == rig.layout.nbytes
    assert len(training.sizes) > 5
    assert max(training.sizes) <= 200
    assert set(rig.stored()[1]) == {2}
    assert not rig.arena.waits


@pytest.mark.parametrize("whole", [True, False])
def test_a_slot_is_held_for_a_short_time_if_looks_do_not_succeed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    looks, held, hold = list[Any](), list[float](), rig.arena.held

    def look() -> Any:
        looks.append(Slots.look(rig.arena))
        rig.copy(rig.everything, 3)
        rig.copy(rig.everything, 4)
        return looks[-1]

    def holding(seconds: float) -> Any:
        held.append(seconds)
        return hold(seconds)

    monkeypatch.setattr(rig.arena, "look", look)
    monkeypatch.setattr(rig.arena, "held", holding)
    rig.persist(rig.save(rig.everything, 2, sealed=whole))
    assert set(rig.stored()[1]) == {4}
    assert held == [LEAST_HOLD]
    assert len(looks) == 3


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, Unavailable), (errno.EIO, Unavailable), (errno.EACCES, AccessDenied)]
)
def test_a_failure_at_any_call_loses_nothing(
    tmp_path: Path, arena_dir: Path, operation: str, number: int, kind: type[ScarError], sealed: bool
) -> None:
    rig = Rig(tmp_path / "store", arena_dir)
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    asked = rig.save(rig.everything, 2, sealed=sealed)
    rig.blobs.fail_at(operation, "lanes/0/log" if operation == "create_exclusive" else "lanes/0/seg", number)
    with pytest.raises(kind):
        rig.persist(asked)
    assert rig.arena.pending().all()
    steps, content = rig.stored()
    assert (steps == content).all()
    rig.persist(asked)
    assert not rig.arena.pending().any()
    assert set(rig.stored()[1]) == {2}
    assert rig.extras() == {"step": 2}
    assert (2 in rig.sealed()) == sealed
    assert rig.records() == 2
    rig.close()


@settings(max_examples=15)
@given(data=st.data())
def test_any_order_of_moments_requests_and_failures(tmp_path_factory: Any, data: st.DataObject) -> None:
    """A model shows that the store never has uncopied bytes, and in the end has each partition's newest copy."""
    folder = tmp_path_factory.mktemp("order")
    rig = Rig(folder / "store", folder)
    n = rig.layout.partitions
    newest, at_step = np.full(n, -1), dict[int, Any]()
    some = st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True).map(
        lambda x: np.array(sorted(x))
    )
    for step in range(1, data.draw(st.integers(2, 7))):
        ids = rig.everything if step == 1 else data.draw(some)
        newest[ids] = step
        at_step[step] = newest.copy()
        rig.copy(ids, step, whole=f"{step:032x}")
        if step == 1 or data.draw(st.booleans()):
            rig.arena.ask(whole=True)
        else:
            rig.arena.ask(ids=data.draw(some))
        if data.draw(st.booleans()):
            if data.draw(st.booleans()):
                rig.blobs.fail(data.draw(st.sampled_from(OPERATIONS)), at=[data.draw(st.integers(1, 4))])
            try:
                rig.persist(rig.arena.asked)
            except Unavailable:
                continue
    rig.blobs.mend()
    rig.persist(rig.arena.ask(whole=True))
    assert not rig.arena.lacking()
    assert (rig.stored()[1] == newest).all()
    for seal in rig.store.state(0).sealed:  # a sealed state is what was there at that step, byte for byte
        state = rig.store.state(0, at=seal.seq)
        for batch in rig.store.read(state, state.ids, corrupt=[]):
            rows = 0
            for i, a, b in zip(batch.ids, *rig.layout.row_ranges(batch.ids), strict=True):
                assert (batch.tensors[0][rows : rows + b - a] == at_step[seal.step][i]).all()
                rows += int(b - a)
    rig.close()


def test_requests_of_another_arena_are_left_alone(rig: Rig) -> None:
    """It was fetched from another host into the place of this one, whose saver still runs."""
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    rig.save(SOME, 2)
    place = rig.arena.folder / FILE
    content = place.read_bytes()
    place.unlink()
    place.write_bytes(content)
    with pytest.raises(Fenced, match="has taken the place"):
        rig.persist(rig.arena.asked)
    thread = PersisterThread(rig.persister)
    assert not thread.drain(30.0)
    assert isinstance(thread.failure, Fenced)
    thread.close()
    assert rig.arena.waits
    assert set(rig.stored()[0]) == {1}
