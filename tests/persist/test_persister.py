"""Test hand-overs into a real store: acknowledged copies are there, others are pending, sealed states are exact."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scarctl.arena.header import FILE
from scarctl.arena.queue import HandOver, HandOverQueue
from scarctl.errors import AccessDenied, Corruption, Fenced, Overwritten, ScarError, Unavailable
from scarctl.persist.inherited import adopt_orphans, reconcile
from scarctl.persist.thread import PersisterThread
from scarctl.state.version import step_of
from scarctl.store import Store, complete_sets
from tests.daemon.rig import Rig
from tests.support.faulty import OPERATIONS

SOME = np.array([0, 3, 4, 11, 18])


def test_a_hand_over_becomes_durable_and_is_acknowledged(rig: Rig) -> None:
    number = rig.save(SOME, 7)
    assert rig.arena.pending().nonzero()[0].tolist() == SOME.tolist()
    assert rig.persist(number) == rig.layout.partition_bytes[SOME].sum()
    assert not rig.arena.pending().any()
    steps, content = rig.stored()
    assert set(steps[SOME]) == set(content[SOME]) == {7}
    assert (np.delete(steps, SOME) == -1).all()
    assert rig.extras() == {"step": 7}


def test_a_sealed_hand_over_makes_all_exact(rig: Rig) -> None:
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    rig.persist(rig.save(SOME[:1], 2, sealed=True))
    assert rig.sealed() == {1, 2}
    steps, content = rig.stored()
    assert (steps == 2).all()
    assert content[SOME[0]] == 2
    assert (np.delete(content, SOME[0]) == 1).all()
    assert not rig.arena.pending().any()


def test_what_a_dead_process_has_copied_is_no_part_of_a_seal_of_the_same_number(rig: Rig) -> None:
    """Its daemon queues the copies, with a queue of its own, whose numbers begin anew."""
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    rig.copy(SOME, 3)
    queue = HandOverQueue(rig.arena.folder)
    assert adopt_orphans(rig.arena, queue) == SOME.size
    assert queue.numbers() == [1]
    rig.persist(1)
    assert step_of(rig.arena.sealed) == 1
    assert not rig.arena.pending().any()
    steps, content = rig.stored()
    assert set(steps[SOME]) == set(content[SOME]) == {3}
    assert set(np.delete(content, SOME)) == {1}


def test_a_state_that_is_sealed_again_has_its_newer_extras_as_part_of_it(rig: Rig) -> None:
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    whole, more = rig.arena.whole, {"step": 1, "batch": 7}
    rig.persist(rig.queue.put(version=rig.version(1), ids=SOME[:0], whole=whole, extras=more))
    assert rig.extras() == more
    states = [rig.store.state(shard) for shard in rig.store.shards()]
    newest = max((state for state in states if state.extras), key=lambda state: state.extras or (-1,))
    assert newest.extras_whole == whole


def test_a_seal_without_changes(rig: Rig) -> None:
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    assert rig.persist(rig.hand_over(SOME[:0], 5, sealed=True)) == 0
    assert rig.sealed() == {1, 5}


def test_what_was_copied_again_is_left_to_its_own_hand_over(rig: Rig) -> None:
    first, second = rig.save(SOME, 1), rig.save(SOME[:2], 2)
    rig.persist(first)
    assert rig.arena.pending()[SOME].tolist() == [True, True, False, False, False]
    rig.persist(second)
    steps, content = rig.stored()
    assert steps[SOME].tolist() == content[SOME].tolist() == [2, 2, 1, 1, 1]


def test_a_seal_that_was_overtaken_is_no_seal(rig: Rig) -> None:
    """Describe a failure: a full checkpoint, a slow store, and the next full checkpoint before the first is written.

    The copies of the first are gone by then. A sealed record of it would label older bytes as that step, and a
    rollback would restore them.
    """
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    overtaken = rig.save(rig.everything, 2, sealed=True)
    newest = rig.save(rig.everything, 3, sealed=True)
    rig.persist(overtaken)
    assert rig.sealed() == {1}
    rig.persist(newest)
    assert rig.sealed() == {1, 3}
    assert set(rig.stored()[1]) == {3}


def test_a_partly_overtaken_seal_saves_the_rest(rig: Rig) -> None:
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    sealed = rig.save(rig.everything, 2, sealed=True)
    later = rig.save(SOME[:1], 3)
    rig.persist(sealed)
    assert rig.sealed() == {1}  # a part of a whole state is useless as a whole state
    rig.persist(later)
    steps, content = rig.stored()
    assert steps[SOME[0]] == content[SOME[0]] == 3
    assert set(np.delete(content, SOME[0])) == {2}


def test_a_seal_fails_where_an_earlier_attempt_was_spoiled(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    number = rig.save(rig.everything, 2, sealed=True)
    overwrite_while_written(rig, monkeypatch, SOME[:1], steps=[3, 4])
    rig.persist(number)
    assert 2 not in rig.sealed()


def test_copies_that_are_overwritten_while_they_are_checked_are_in_no_older_seal(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer flushes when the persister has found everything to be of the older step, before it writes."""
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    number = rig.save(rig.everything, 2, sealed=True)
    is_of, later = rig.persister._is_of, list[int]()

    def checked(*arguments: Any) -> bool:
        answer = is_of(*arguments)
        if not later:
            later.append(rig.save(rig.everything, 3, sealed=True))
        return answer

    monkeypatch.setattr(rig.persister, "_is_of", checked)
    rig.persist(number)
    assert rig.sealed() == {1}
    assert set(rig.stored()[1]) == {1}
    rig.persist(later[0])
    assert rig.sealed() == {1, 3}
    assert set(rig.stored()[1]) == {3}


def overwrite_while_written(rig: Rig, monkeypatch: pytest.MonkeyPatch, ids: Any, steps: list[int]) -> None:
    """Make the trainer copy `ids` again, at these steps, each time a segment is written."""
    commit = rig.writer.commit

    def committing(at: int, *args: Any, **kwargs: Any) -> Any:
        if steps:
            rig.copy(ids, steps.pop(0))  # after the generations were noted
        return commit(at, *args, **kwargs)

    monkeypatch.setattr(rig.writer, "commit", committing)


def test_copies_that_change_while_they_are_written_are_written_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = rig.save(SOME, 1)
    overwrite_while_written(rig, monkeypatch, SOME[:1], steps=[2])
    rig.persist(number)
    assert rig.stored()[0][SOME].tolist() == [-1, 1, 1, 1, 1]
    assert rig.arena.pending().nonzero()[0].tolist() == [SOME[0]]
    rig.persist(rig.hand_over(SOME[:1], 2))
    assert rig.stored()[1][SOME].tolist() == [2, 1, 1, 1, 1]


def test_copies_that_never_stop_changing_are_put_off(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    number = rig.save(SOME, 1)
    overwrite_while_written(rig, monkeypatch, SOME[:1], steps=[1] * 100)  # always of the same version
    with pytest.raises(Overwritten, match="keep changing") as caught:
        rig.persist(number)
    assert caught.value.retryable
    assert rig.arena.pending()[SOME[0]]


def test_a_copy_under_way_is_not_written(rig: Rig) -> None:
    number = rig.save(SOME, 1)
    rig.arena.begin(SOME[:1])
    fill_some_of_it = rig.arena.rows(0, 0)
    fill_some_of_it[0] = 99
    rig.persist(number)
    assert rig.stored()[0][SOME].tolist() == [-1, 1, 1, 1, 1]


def test_values_that_changed_without_a_step_are_saved_again(rig: Rig) -> None:
    """Describe a failure: weights are swapped after the loop (an average) before the session's closing checkpoint.

    This checkpoint has the step of the last one. So its copies have a version that the store already has, with other
    bytes.
    """
    rig.persist(rig.save(rig.everything, 5, sealed=True))
    rig.copy(SOME, 5, value=77)
    assert rig.arena.pending().nonzero()[0].tolist() == SOME.tolist()
    rig.persist(rig.hand_over(SOME, 5, sealed=True))
    steps, content = rig.stored()
    assert set(content[SOME]) == {77}
    assert (steps == 5).all()
    assert not rig.arena.pending().any()


def test_a_copy_of_the_same_step_that_is_made_during_the_acknowledgement_stays_pending(rig: Rig) -> None:
    rig.copy(SOME, 5)
    noted = rig.arena.generation[SOME].copy()
    rig.copy(SOME[:2], 5, value=77)
    rig.arena.acknowledge(SOME, rig.version(5), noted)
    assert rig.arena.pending().nonzero()[0].tolist() == SOME[:2].tolist()


def test_copies_that_were_never_handed_over_are_adopted(rig: Rig) -> None:
    rig.copy(SOME[:2], 3)
    rig.copy(SOME[2:4], 4)
    rig.arena.begin(SOME[4:])  # torn: not a copy
    named = rig.save(np.array([1]), 2)
    assert adopt_orphans(rig.arena, rig.queue) == 4
    assert adopt_orphans(rig.arena, rig.queue) == 0  # they have hand-overs now
    numbers = rig.queue.numbers()
    assert numbers[0] == named
    for number in numbers:
        rig.persist(number)
    steps, content = rig.stored()
    assert steps[SOME].tolist() == content[SOME].tolist() == [3, 3, 4, 4, -1]
    assert not rig.arena.pending()[SOME].any()


def test_copies_without_a_hand_over_go_before_newer_ones(rig: Rig) -> None:
    """Describe a failure: the hand-over of step 5 could not be written, that of 7 could. Steps must not decrease."""
    rig.copy(SOME[:2], 5)
    later = rig.save(SOME[3:], 7)
    adopt_orphans(rig.arena, rig.queue)
    assert rig.queue.numbers()[0] == later
    for number in rig.queue.numbers():
        rig.persist(number)
    assert rig.stored()[0][SOME].tolist() == [5, 5, -1, 7, 7]


def test_copies_that_waited_are_saved_in_one_commit_whatever_their_steps(rig: Rig) -> None:
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    before = rig.records()
    for step in range(2, 9):
        rig.copy(rig.everything[step::9], step)  # their hand-overs were replaced
    rig.persist(rig.save(rig.everything[::9], 9))
    assert rig.records() == before + 1
    steps, content = rig.stored()
    assert steps.tolist() == content.tolist() == [{0: 9}.get(i % 9, i % 9) for i in rig.everything.tolist()]
    assert not rig.arena.pending().any()
    assert rig.extras() == {"step": 9}


def test_copies_that_waited_are_part_of_the_state_that_is_sealed(rig: Rig) -> None:
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    rig.copy(SOME[:3], 2)
    rig.persist(rig.save(SOME[3:], 5, sealed=True))
    steps, content = rig.stored()
    assert (steps == 5).all()  # they have not changed since
    assert content[SOME].tolist() == [2, 2, 2, 5, 5]
    assert rig.sealed() == {1, 5}


def test_a_copy_that_is_renewed_while_older_ones_are_written_stays_pending(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    rig.copy(SOME[:1], 2)
    number = rig.save(SOME[3:], 5)
    overwrite_while_written(rig, monkeypatch, SOME[:1], steps=[6])
    rig.persist(number)
    assert rig.arena.pending().nonzero()[0].tolist() == [SOME[0]]
    assert rig.stored()[1][SOME].tolist() == [1, 1, 1, 5, 5]


def test_a_seal_without_changes_outlives_its_process(tmp_path: Path, arena_dir: Path) -> None:
    """It names no partition, but has the extras of the step from which the next process continues."""
    rig = Rig(tmp_path / "store", arena_dir)
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    rig.hand_over(SOME[:0], 5, sealed=True)
    rig.die()
    rig = Rig(tmp_path / "store", arena_dir)
    assert set(rig.store.state(0).version) == {rig.arena.version[0]}
    reconcile(rig.arena, rig.queue, rig.writer.state, rig.writer.epoch)
    for number in rig.queue.numbers():
        rig.persist(number)
    assert rig.extras() == {"step": 5}
    assert rig.sealed() == {1, 5}
    rig.close()


def test_a_seal_that_was_committed_and_not_noted_is_the_state_in_memory(
    tmp_path: Path, arena_dir: Path
) -> None:
    """Killed between the commit and its note: unchanged copies are valid, though the store has a newer version of
    them.
    """
    rig = Rig(tmp_path / "store", arena_dir)
    rig.persist(rig.save(rig.everything, 1, sealed=True))
    whole = rig.queue.read(rig.save(SOME[:2], 5, sealed=True)).whole
    handover = rig.queue.pending()[0]
    noted = rig.arena.version.copy(), rig.arena.durable.copy()
    rig.persister._commit(SOME[:2], handover, None)
    rig.arena.version[:], rig.arena.durable[:] = noted
    rig.die()
    rig = Rig(tmp_path / "store", arena_dir)
    reconcile(rig.arena, rig.queue, rig.writer.state, rig.writer.epoch)
    assert rig.arena.intact().all()
    assert rig.arena.whole == whole
    assert [handover.whole for handover in rig.queue.pending()] == [whole]
    for number in rig.queue.numbers():
        rig.persist(number)
    assert complete_sets(Store.open(str(rig.store.root)))[0].whole == whole
    rig.close()


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
    handover = rig.queue.read(rig.save(rig.everything, 2, sealed=sealed))
    rig.blobs.fail_at(operation, "lanes/0/log" if operation == "create_exclusive" else "lanes/0/seg", number)
    with pytest.raises(kind):
        rig.persister.persist(handover)
    assert rig.arena.pending().all()
    steps, content = rig.stored()
    assert (steps == content).all()
    rig.persister.persist(handover)
    assert not rig.arena.pending().any()
    assert set(rig.stored()[1]) == {2}
    assert rig.extras() == {"step": 2}
    assert (2 in rig.sealed()) == sealed
    assert rig.records() == 2
    rig.close()


def test_a_hand_over_of_another_layout_is_refused(rig: Rig) -> None:
    with pytest.raises(Corruption, match="do not exist"):
        rig.persister.check(HandOver(1, rig.version(1), np.array([rig.layout.partitions]), "", None))


@settings(max_examples=15)
@given(data=st.data())
def test_any_order_of_copies_hand_overs_and_failures(tmp_path_factory: Any, data: st.DataObject) -> None:
    """A model shows that the store never has uncopied bytes, and in the end has each partition's newest copy."""
    folder = tmp_path_factory.mktemp("order")
    rig = Rig(folder / "store", folder)
    n = rig.layout.partitions
    newest, at_step = np.full(n, -1), dict[int, Any]()
    some = st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True).map(
        lambda x: np.array(sorted(x))
    )
    for step in range(1, data.draw(st.integers(2, 7))):
        sealed = step == 1 or data.draw(st.booleans())
        ids = rig.everything if step == 1 else data.draw(some)
        newest[ids] = step
        at_step[step] = newest.copy()
        rig.copy(ids, step)
        staged, before = data.draw(st.booleans()), rig.queue.numbers()
        if sealed:  # all pending copies are saved too
            ids = np.union1d(ids, np.flatnonzero(rig.arena.pending()))
        rig.hand_over(ids, step, sealed=sealed, staged=staged)
        if sealed:  # it has all that waits, and newer
            for number in before:
                rig.queue.remove(number)
        while rig.queue.numbers() and data.draw(st.booleans()):
            if data.draw(st.booleans()):
                rig.blobs.fail(data.draw(st.sampled_from(OPERATIONS)), at=[data.draw(st.integers(1, 4))])
            try:
                rig.persist(rig.queue.numbers()[0])
            except Unavailable:
                break
    rig.blobs.mend()
    for number in rig.queue.numbers():
        rig.persist(number)
    assert not rig.arena.pending().any()
    assert (rig.stored()[1] == newest).all()
    for seal in rig.store.state(0).sealed:  # an exact state is what was there at that step, byte for byte
        state = rig.store.state(0, at=seal.seq)
        for batch in rig.store.read(state, state.ids, corrupt=[]):
            rows = 0
            for i, a, b in zip(batch.ids, *rig.layout.row_ranges(batch.ids), strict=True):
                assert (batch.tensors[0][rows : rows + b - a] == at_step[seal.step][i]).all()
                rows += int(b - a)
    rig.close()


def test_hand_overs_of_another_arena_are_left_alone(rig: Rig) -> None:
    """It was fetched from another host into the place of this one, whose saver still runs."""
    rig.persist(rig.save(rig.everything, 1))
    number = rig.save(SOME, 2)
    rig.persister.check(rig.queue.read(number))
    place = rig.arena.folder / FILE
    content = place.read_bytes()
    place.unlink()
    place.write_bytes(content)
    with pytest.raises(Fenced, match="has taken the place"):
        rig.persister.check(rig.queue.read(number))
    thread = PersisterThread(rig.persister, rig.queue)
    assert not thread.drain(30.0)
    assert isinstance(thread.failure, Fenced)
    thread.close()
    assert rig.queue.numbers() == [number]
    assert set(rig.stored()[0]) == {1}
