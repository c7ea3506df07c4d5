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
from scarctl.errors import AccessDenied, Fenced, Overwritten, ScarError, Unavailable
from scarctl.persist import persister as module
from scarctl.persist.thread import PersisterThread
from scarctl.state.version import step_of
from tests.daemon.rig import Rig
from tests.support.faulty import OPERATIONS

SOME = np.array([0, 3, 4, 11, 18])


@pytest.fixture(params=["copied", "held"])
def private(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return whether a whole state is copied into a private buffer, or its slot is held while it is written."""
    if request.param == "held":
        monkeypatch.setattr(module, "PRIVATE", 0)
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


def test_a_state_that_never_holds_still_is_put_off(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PRIVATE", 0)
    number = rig.save(rig.everything, 2, sealed=True)
    commit = rig.writer.commit

    def committing(*args: Any, **kwargs: Any) -> Any:
        for _ in range(2):
            begun = rig.arena.begin_moment(flush=True)
            assert begun is not None
            rig.arena.flip(begun[0], begun[1], rig.version(3), "")
        return commit(*args, **kwargs)

    monkeypatch.setattr(rig.writer, "commit", committing)
    with pytest.raises(Overwritten, match="keeps changing") as caught:
        rig.persist(number)
    assert caught.value.retryable
    assert rig.arena.waits
    assert rig.records() == 0


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


def test_a_seal_that_was_noted_is_not_made_again(rig: Rig) -> None:
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    assert step_of(rig.arena.sealed) == 1
    assert rig.arena.kept == rig.arena.slot.moment
