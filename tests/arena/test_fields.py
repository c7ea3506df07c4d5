"""Test the words in an arena's header: each is one word, and the order of writing survives a kill."""

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
    fields.keep(13)
    fields.note_encoding("int8")
    fields._flip(1)
    assert fields._next_moment() == 1
    assert fields._ask(whole=True) == 1
    assert fields._ask(whole=False) == 2
    fields.serve(1)
    assert named(words) == {
        "epoch": 3,
        "base_epoch": 3,
        "head_step": 7,
        "pid": 99,
        "sealed": 11,
        "errors": 2,
        "failed_saves": 1,
        "kept": 13,
        "encoding": 2,
        "current": 1,
        "moment": 1,
        "asked": 2,
        "asked_whole": 1,
        "served": 1,
    }
    read = (fields.epoch, fields.base_epoch, fields.head_step, fields.pid, fields.sealed, fields.errors)
    assert read == (3, 3, 7, 99, 11, 2)
    assert (fields.kept, fields.encoding, fields.current, fields.failed_saves) == (13, "int8", 1, 1)
    fields.take_over()
    assert fields.pid == os.getpid()


def test_another_daemon_keeps_the_first_epoch(words: np.ndarray) -> None:
    fields = Fields(words)
    fields.begin_epoch(3)
    fields.begin_epoch(4, again=True)
    assert (fields.base_epoch, fields.epoch) == (3, 4)
    fields.begin_epoch(6)
    assert (fields.base_epoch, fields.epoch) == (6, 6)


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
    fields.keep(4)
    number = fields._ask(whole=True)
    fields._clear()
    assert (fields.epoch, fields.head_step, fields.errors) == (3, 7, 2)
    assert (fields.sealed, fields.kept, fields.waits, fields.served) == (NEVER, 0, False, number)
    assert fields.pid == os.getpid()
