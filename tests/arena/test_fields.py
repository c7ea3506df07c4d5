"""Test the counters in an arena's header: each is one word, and the order of writing survives a kill."""

from __future__ import annotations

import os

import numpy as np
import pytest

from scarctl.arena.fields import Fields
from scarctl.arena.header import FIELDS
from scarctl.state.version import NEVER


@pytest.fixture
def words() -> np.ndarray:
    return np.zeros(len(FIELDS), np.int64)


def named(words: np.ndarray) -> dict[str, int]:
    """Return the fields that are not 0, by their names in the header."""
    return {name: int(value) for name, value in zip(FIELDS, words, strict=True) if value}


def test_every_field_has_its_word(words: np.ndarray) -> None:
    fields = Fields(words)
    fields.begin_epoch(3)
    fields.reach(7)
    fields.take_over(99)
    fields.seal(11)
    fields.note_errors(2)
    fields.count_failed_save()
    fields.read(13)
    fields.note_moment(12)
    assert named(words) == {
        "epoch": 3,
        "base_epoch": 3,
        "head_step": 7,
        "pid": 99,
        "sealed": 11,
        "errors": 2,
        "failed_saves": 1,
        "taken": 13,
        "moment": 12,
    }
    read = (fields.epoch, fields.base_epoch, fields.head_step, fields.pid, fields.sealed, fields.errors)
    assert read == (3, 3, 7, 99, 11, 2)
    assert (fields.taken, fields.moment, fields.failed_saves) == (13, 12, 1)
    fields.take_over()
    assert fields.pid == os.getpid()


def test_another_daemon_keeps_the_first_epoch_and_what_was_taken(words: np.ndarray) -> None:
    fields = Fields(words)
    fields.begin_epoch(3)
    fields.read(5)
    fields.read(4)  # what waited longer was read later
    fields.begin_epoch(4, again=True)
    assert (fields.base_epoch, fields.epoch, fields.taken) == (3, 4, 5)
    fields.begin_epoch(6)
    assert (fields.base_epoch, fields.epoch, fields.taken) == (6, 6, 0)


@pytest.mark.parametrize("whole", ["", "f" * 32, "0" * 31 + "1", "8" + "0" * 31, "0123456789abcdef" * 2])
def test_a_name_of_a_whole_state_comes_back(words: np.ndarray, whole: str) -> None:
    fields = Fields(words)
    fields.name_whole("a" * 32)
    fields.name_whole(whole)
    assert fields.whole == whole
    assert set(named(words)) <= {"whole", "whole_low"}


@pytest.mark.parametrize(("overhead", "word"), [(None, 0), (0.0, 1), (0.0123, 12301)])
def test_an_unknown_overhead_is_not_one_of_zero(words: np.ndarray, overhead: float | None, word: int) -> None:
    Fields(words).note_pace(25, overhead)
    assert words[FIELDS.index("interval")] == 25
    assert words[FIELDS.index("overhead")] == word


def test_a_process_without_copies_keeps_epoch_step_and_errors(words: np.ndarray) -> None:
    fields = Fields(words)
    fields.begin_epoch(3)
    fields.reach(7)
    fields.note_errors(2)
    fields.seal(11)
    fields.name_whole("a" * 32)
    fields.note_moment(12)
    fields.read(4)
    fields._clear()
    assert (fields.epoch, fields.head_step, fields.errors) == (3, 7, 2)
    assert (fields.sealed, fields.whole, fields.moment, fields.taken) == (NEVER, "", NEVER, 0)
    assert fields.pid == os.getpid()
