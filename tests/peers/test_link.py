"""Test the states of a link: every event in every state, and the important sequences."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from scarctl.peers.link import BEHIND_AFTER, REPLACED_AFTER, Link, State


def following(candidates: int = 2) -> Link:
    link = Link(candidates)
    assert link.begin(0.0)
    assert link.state is State.CONNECTING
    link.accepted(1.0)
    assert link.state is State.FULL
    assert not link.complete
    link.marked(2.0)
    assert link.state is State.FOLLOWING
    assert link.complete
    return link


def test_a_link_that_is_slow_is_behind_until_the_next_mark() -> None:
    link = following()
    link.tick(2.0 + BEHIND_AFTER, waiting=False)
    assert link.state is State.FOLLOWING
    link.tick(2.0 + BEHIND_AFTER, waiting=True)
    assert link.state is State.BEHIND
    link.marked(20.0)
    assert link.state is State.FOLLOWING


def test_a_lost_link_is_tried_again_and_after_a_minute_replaced() -> None:
    link = following()
    link.lost(10.0)
    assert link.state is State.LOST
    tries = 0
    now = 10.0
    while link.state is not State.REPLACED:
        now += 0.1
        if link.tick(now):
            assert (link.at, link.state) == (0, State.CONNECTING)
            tries += 1
            link.lost(now)
    assert REPLACED_AFTER <= now - 10.0 < REPLACED_AFTER + 1
    assert 5 < tries < 20  # the pauses grow
    assert link.tick(now + 0.1)
    assert (link.at, link.state, link.complete) == (1, State.CONNECTING, False)


def test_a_short_interruption_replaces_nobody() -> None:
    link = following()
    link.lost(10.0)
    assert link.tick(11.0)
    link.accepted(11.0)
    link.marked(12.0)
    link.lost(65.0)
    link.tick(75.0)
    assert link.at == 0


def test_a_host_that_accepts_and_never_answers_is_replaced() -> None:
    """A connection may open and carry nothing: large packets are lost on the way, or the host fails at each frame."""
    link = following()
    link.lost(10.0)
    now, tries = 10.0, 0
    while link.state is not State.REPLACED:
        now += 0.1
        if link.tick(now):
            link.accepted(now, complete=True)
            link.lost(now)
            tries += 1
    assert REPLACED_AFTER <= now - 10.0 < REPLACED_AFTER + 1
    assert 5 < tries < 20, "the pauses grow"


def test_a_host_that_answers_is_not_replaced_before_its_first_mark() -> None:
    """A first copy may take long, over a network that is cut now and then."""
    link = following()
    for now in range(10, 1000, 50):
        link.lost(float(now))
        assert link.tick(now + 20.0)
        link.accepted(now + 20.0)
        link.answered(now + 21.0)
    assert link.at == 0


def test_a_lost_host_is_kept_while_no_other_is_free() -> None:
    """Its copy has an age, which others would not have."""
    link = following()
    link.lost(0.0)
    for now in range(1, 2000):
        if link.tick(float(now), spare=False):
            link.lost(float(now))
    assert (link.at, link.complete) == (0, True)
    link.tick(2000.0, spare=True)
    assert link.state is State.REPLACED


def test_the_only_candidate_is_tried_for_ever() -> None:
    link = following(candidates=1)
    link.lost(0.0)
    for now in range(1, 2000):
        if link.tick(float(now)):
            link.lost(float(now))
    assert link.state is State.LOST


def test_a_refusal_goes_to_the_next_candidate_at_once_and_pauses_after_the_last() -> None:
    link = Link(2)
    link.begin(0.0)
    link.refused(1.0)
    assert link.tick(1.0)
    assert link.at == 1
    link.refused(1.0)
    assert not link.tick(1.0)
    assert link.tick(2.0)
    assert link.at == 0


def test_the_only_host_keeps_its_age_when_it_refuses() -> None:
    """It has a complete replica, and no room for the extras. It is asked again after growing pauses."""
    link = following(1)
    pauses, now = [], 10.0
    for _ in range(5):
        link.refused(now)
        assert (link.state, link.complete) == (State.LOST, True)
        began = now
        while not link.tick(now):
            now += 0.05
        link.accepted(now, complete=True)
        pauses.append(now - began)
    assert all(one < other for one, other in itertools.pairwise(pauses)), pauses


def test_a_host_that_goes_is_not_kept_waiting_by_an_earlier_loss() -> None:
    link = following(1)
    for now in (10.0, 11.0, 13.0, 16.0, 21.0):
        link.lost(now)
        link.tick(now + 4)
    link.lost(30.0)
    assert not link.tick(30.1)
    link.hurry(30.1)
    assert link.tick(30.1)


def test_a_replica_that_is_complete_counts_as_soon_as_the_link_is_back() -> None:
    link = following()
    link.lost(10.0)
    assert link.complete
    assert link.tick(12.0)
    link.accepted(13.0, complete=True)
    assert (link.state, link.complete) == (State.FOLLOWING, True)


def test_without_candidates_nothing_is_tried() -> None:
    link = Link(0)
    assert not link.begin(0.0)
    assert not link.tick(1e6)
    assert link.state is State.ABSENT


TIMES = st.floats(0, 1000)
NAMES = ("begin", "accepted", "answered", "marked", "lost", "refused", "overtaken", "close", "hurry", "tick")
EVENTS = st.lists(st.tuples(st.sampled_from(NAMES), TIMES, st.booleans()), max_size=60)


@given(EVENTS, st.integers(0, 4))
def test_any_events_in_any_order(events: list[tuple[str, float, bool]], candidates: int) -> None:
    link = Link(candidates)
    for name, now, flag in events:
        ended = link.ended
        details = {"accepted": {"complete": flag}, "tick": {"waiting": flag}}.get(name, {})
        connect = getattr(link, name)(now, **details)
        assert not connect or link.state is State.CONNECTING
        assert not (ended and connect)
        assert link.at < max(1, candidates)
        if link.state in (State.FOLLOWING, State.BEHIND):
            assert link.complete  # no run relies on a replica that was never complete
        if ended:
            assert link.ended  # permanently
