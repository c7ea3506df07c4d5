"""Test two slots: what a moment copies, and when a reader may rely on the slot that it holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scarctl.arena.arena import Arena
from scarctl.arena.header import FIELDS
from scarctl.state.version import NEVER, pack, step_of
from tests.arena.arenas import ALL, LAYOUT, create, reopen
from tests.daemon.rig import acknowledge, copy_into, values


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    made = create(tmp_path / "run")
    assert copy_into(made, ALL, pack(1, 1), 1, whole="ab" * 16)
    return made


def steps(ids: np.ndarray) -> list[int]:
    return step_of(ids).tolist()


@given(moments=st.lists(st.tuples(st.sets(st.sampled_from(ALL.tolist())), st.booleans()), max_size=12))
def test_each_slot_has_the_state_of_its_moment(moments: list[tuple[set[int], bool]]) -> None:
    """Of what changes; and whether the checkpoint is abandoned before it is complete."""
    arena = Arena.anonymous(LAYOUT, slots=2)
    assert copy_into(arena, ALL, pack(1, 1), 1)
    live, state = np.ones(ALL.size, dtype=int), np.ones(ALL.size, dtype=int)
    changed: set[int] = set()
    for step, (chosen, abandoned) in enumerate(moments, 2):
        changed |= chosen
        live[sorted(chosen)] = step
        ids = np.array(sorted(changed), dtype=np.int64)
        if abandoned:
            begun = arena.begin_moment()
            assert begun is not None
            begun[0].end(ids[::2], pack(1, step), begun[1])
            continue
        begun = arena.begin_moment()
        assert begun is not None
        slot, moment = begun
        arena.carry(np.delete(ALL, ids))
        for i in ids.tolist():
            slot.begin(np.array([i]))
            for t, spec in enumerate(LAYOUT.groups[int(LAYOUT.group_of([i])[0])].tensors):
                del spec
                g = int(LAYOUT.group_of([i])[0])
                (start,), (stop,) = LAYOUT.row_ranges([i])
                slot.rows(g, t)[start:stop] = live[i]
            slot.end(np.array([i]), pack(1, step), moment)
        arena.flip(slot, moment, pack(1, step), "ab" * 16)
        changed, state = set(), live.copy()
    for i in ALL.tolist():
        if LAYOUT.partition_bytes[i]:
            assert values(arena.slot, i) == {int(state[i])}
    equal = (arena.slot.moments == arena.spare.moments) & arena.spare.intact()
    for i in np.flatnonzero(equal).tolist():
        if LAYOUT.partition_bytes[i]:
            assert values(arena.spare, i) == {int(state[i])}, "equal moments have equal bytes"


def test_what_is_carried_over_is_equal_in_both_slots_or_in_neither(arena: Arena) -> None:
    assert copy_into(arena, ALL[:2], pack(1, 2), 2)
    arena.slot.begin(ALL[:1])
    begun = arena.begin_moment()
    assert begun is not None
    arena.spare.begin(ALL[5:6])
    arena.carry(ALL[:4])
    assert (arena.spare.moments[:4] == arena.moments[:4]).all()
    assert (arena.spare.version[1:4] == arena.version[1:4]).all()
    assert [values(arena.spare, i) for i in (1, 2, 3)] == [{2}, {1}, {1}]
    assert not arena.spare.intact()[[0, 5]].any()
    arena.remove()


def test_copies_of_a_whole_state_are_of_its_step(arena: Arena) -> None:
    assert copy_into(arena, ALL[:2], pack(1, 5), 5, whole="cd" * 16)
    assert steps(arena.version) == [5, 5, *[1] * (ALL.size - 2)]
    assert set(steps(arena.newest())) == {5}
    arena.slot.name("")
    assert steps(arena.newest()) == steps(arena.version)
    arena.remove()


def test_only_what_is_new_is_pending(arena: Arena) -> None:
    acknowledge(arena, ALL)
    assert not arena.pending().any()
    assert arena.lacking(), "the store has no extras of this moment"
    arena.keep(arena.slot.moment)
    assert not arena.lacking()
    assert copy_into(arena, ALL[1:3], pack(1, 1), 7), "the same step, and another state"
    assert np.flatnonzero(arena.pending()).tolist() == [1, 2]
    arena.remove()


def test_what_was_never_complete_is_forgotten_at_the_next_start(arena: Arena) -> None:
    begun = arena.begin_moment()
    assert begun is not None
    slot, moment = begun
    slot.end(ALL[:3], pack(1, 2), moment)
    folder = arena.folder
    arena.close()
    again = reopen(folder)
    assert again is not None
    assert again.slot.whole == "ab" * 16
    again.settle()
    assert not again.spare.intact()[:3].any()
    assert set(steps(again.newest())) == {1}
    again.remove()


def test_requests_wait_until_they_are_served(arena: Arena) -> None:
    assert not arena.waits
    first = arena.ask(ids=ALL[:2], encoded=ALL[2:3])
    assert (arena.waits, arena.wants_whole, arena.asked, arena.served) == (True, False, first, 0)
    assert (arena.wish[:3] // 2).tolist() == [first] * 3
    assert (arena.wish[:3] % 2).tolist() == [0, 0, 1]
    second = arena.ask(whole=True)
    assert arena.wants_whole
    arena.serve(first)
    assert (arena.waits, arena.wants_whole) == (True, True)
    arena.serve(second)
    arena.serve(first)
    assert (arena.waits, arena.wants_whole, arena.served) == (False, False, second)
    arena.reset()
    assert not arena.waits
    assert (arena.version == NEVER).all()
    arena.remove()


def test_a_process_that_is_killed_while_it_asks_leaves_memory_that_opens(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The word that says what is wanted is written first. The next request then wants everything, too."""
    folder = arena.folder
    monkeypatch.setattr(arena, "_words", KilledAt(arena._words, FIELDS.index("asked")))
    with pytest.raises(KilledAt.Dead):
        arena.ask(whole=True)
    arena.close()
    again = reopen(folder)
    assert again is not None
    assert not again.waits
    again.ask(ids=ALL[:1])
    assert again.wants_whole
    again.remove()


@pytest.mark.parametrize("word", ["moment_{}", "head_{}", "whole_{}"])
def test_a_slot_whose_words_are_not_all_written_is_of_no_new_moment(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    """So a look that began meanwhile has ended, and a state whose age is noted anew is not called whole."""
    copy_into(arena, ALL, pack(1, 2), 2, whole="cd" * 16)
    slot = arena.slot
    before, name = slot.moment, word.format(slot.number)
    at = next(n for n, field in enumerate(FIELDS) if field == name)
    monkeypatch.setattr(slot, "_words", KilledAt(slot._words, at - FIELDS.index(f"moment_{slot.number}")))
    with pytest.raises(KilledAt.Dead):
        slot.stamp(before + 1, pack(1, 1), "")
    monkeypatch.undo()
    assert slot.moment == before
    assert word.startswith("whole") or slot.whole == ""
    arena.remove()


class KilledAt:
    """Words in memory. A process is killed before it writes one of them."""

    class Dead(BaseException):
        """Stands for SIGKILL."""

    def __init__(self, words: np.ndarray, at: int) -> None:
        self._words, self._at = words, at

    def __getitem__(self, at: object) -> object:
        return self._words[at]

    def __setitem__(self, at: object, value: object) -> None:
        if self._at in np.atleast_1d(np.arange(self._words.size)[at]):  # type: ignore[index]
            raise self.Dead
        self._words[at] = value
