"""Test the journal of a run: its entries are restored, bounded; entries that no run can have written are skipped."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scarctl.state import codec
from scarctl.state.extras import Notes
from scarctl.state.journal import MOST, MOST_SAMPLES, Journal, Sample, read_events, read_samples


def notes(journal: Journal) -> Notes:
    return Notes(events=tuple(journal), samples=journal.samples)


def test_events_and_samples_come_back_from_extras() -> None:
    journal = Journal()
    journal.add("started", 0, process="host:1")
    journal.add("resumed", 7, consistent=True, perturbation=math.nan, low=0.5)
    journal.sample(Sample(10.0, 7, 5, -1, 0.25))
    found = Notes.from_tree(codec.decode(*codec.encode(notes(journal).to_tree())))
    assert found.events == tuple(journal)
    assert dict(found.events[1].facts) == {"consistent": True, "low": 0.5}
    assert read_samples(found.samples) == [Sample(10.0, 7, 5, -1, 0.25)]


def test_a_run_that_continues_another_has_its_events_first() -> None:
    first, second = Journal(), Journal()
    for step in range(MOST + 5):
        first.add("resumed", step)
    second.add("started", 0)
    second.follow(first, first.samples)
    assert [event.step for event in second] == [*range(6, MOST + 5), 0]
    assert [event.kind for event in second][-2:] == ["resumed", "started"]


def test_samples_cover_the_whole_run_however_long_it_is() -> None:
    journal, now, taken = Journal(), 0.0, 0
    for step in range(20_000):
        now += 1.0
        if journal.due(now):
            taken += 1
            journal.sample(Sample(now, step, step, step, 0.0))
    found = read_samples(journal.samples)
    assert MOST_SAMPLES / 2 <= len(found) <= MOST_SAMPLES
    gaps = np.diff([sample.seconds for sample in found])
    assert found[0].seconds == 1.0
    assert found[-1].seconds > 20_000 - 2 * gaps.max()
    assert gaps.max() <= 4 * gaps.min()
    assert taken < 2_000


def test_a_clock_that_was_set_back_takes_a_sample_at_once() -> None:
    journal = Journal()
    journal.sample(Sample(1e9, 1, 1, 1, 0.0))
    assert not journal.due(1e9 + 0.1)
    assert journal.due(1e9 - 3600)


@pytest.mark.parametrize(
    "stored",
    [None, 5, {}, [5], [{}], [{"kind": 1, "at": "x", "step": 0}], [{"kind": "a", "at": "x", "step": True}],
     [{"kind": "a", "at": "x", "step": -1}], [{"kind": "a", "at": "x", "step": 1 << 70}]],
)  # fmt: skip
def test_what_is_no_event_is_skipped(stored: object) -> None:
    assert read_events(stored) == ()


def test_long_texts_of_an_event_are_cut_and_nested_values_left_out() -> None:
    (event,) = read_events(
        [{"kind": "k" * 999, "at": "", "step": 1, "why": "w" * 999, "deep": [[]], "big": 1 << 90}]
    )
    assert (len(event.kind), dict(event.facts)) == (200, {"why": "w" * 200})


@pytest.mark.parametrize(
    "stored",
    [None, [[1.0] * 5], np.zeros((2, 4)), np.zeros(5), np.zeros((MOST_SAMPLES + 1, 5)), np.zeros((2, 5), np.int64),
     np.full((2, 5), np.nan)],
)  # fmt: skip
def test_what_are_no_samples_gives_none(stored: object) -> None:
    assert read_samples(stored) == []


ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
)


@given(ANYTHING, ANYTHING)
def test_anything_can_be_read(events: Any, samples: Any) -> None:
    found = Notes.from_tree({"events": events, "samples": samples})
    assert len(found.events) <= MOST
    assert read_samples(found.samples) == []
