"""Test the states of a link: every event in every state, and the important sequences."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scarctl.peers.link import (
    BEHIND_AFTER,
    REPLACED_AFTER,
    Accepted,
    Begin,
    Close,
    Event,
    Hurry,
    Link,
    Lost,
    Marked,
    Overtaken,
    Refused,
    State,
    Tick,
)


def following(candidates: int = 2) -> Link:
    link = Link(candidates)
    assert link.handle(Begin(0.0))
    assert link.state is State.CONNECTING
    link.handle(Accepted(1.0))
    assert link.state is State.FULL
    assert not link.complete
    link.handle(Marked(2.0))
    assert link.state is State.FOLLOWING
    assert link.complete
    return link


def test_a_link_that_is_slow_is_behind_until_the_next_mark() -> None:
    link = following()
    link.handle(Tick(2.0 + BEHIND_AFTER, waiting=False))
    assert link.state is State.FOLLOWING
    link.handle(Tick(2.0 + BEHIND_AFTER, waiting=True))
    assert link.state is State.BEHIND
    link.handle(Marked(20.0))
    assert link.state is State.FOLLOWING


def test_a_lost_link_is_tried_again_and_after_a_minute_replaced() -> None:
    link = following()
    link.handle(Lost(10.0))
    assert link.state is State.LOST
    tries = 0
    now = 10.0
    while link.state is not State.REPLACED:
        now += 0.1
        if link.handle(Tick(now)):
            assert (link.at, link.state) == (0, State.CONNECTING)
            tries += 1
            link.handle(Lost(now))
    assert REPLACED_AFTER <= now - 10.0 < REPLACED_AFTER + 1
    assert 5 < tries < 20  # the pauses grow
    assert link.handle(Tick(now + 0.1))
    assert (link.at, link.state, link.complete) == (1, State.CONNECTING, False)


def test_a_short_interruption_replaces_nobody() -> None:
    link = following()
    link.handle(Lost(10.0))
    assert link.handle(Tick(11.0))
    link.handle(Accepted(11.0))
    link.handle(Marked(12.0))
    link.handle(Lost(65.0))
    link.handle(Tick(75.0))
    assert link.at == 0


def test_the_only_candidate_is_tried_for_ever() -> None:
    link = following(candidates=1)
    link.handle(Lost(0.0))
    for now in range(1, 2000):
        if link.handle(Tick(float(now))):
            link.handle(Lost(float(now)))
    assert link.state is State.LOST


def test_a_refusal_goes_to_the_next_candidate_at_once_and_pauses_after_the_last() -> None:
    link = Link(2)
    link.handle(Begin(0.0))
    link.handle(Refused(1.0))
    assert link.handle(Tick(1.0))
    assert link.at == 1
    link.handle(Refused(1.0))
    assert not link.handle(Tick(1.0))
    assert link.handle(Tick(2.0))
    assert link.at == 0


def test_a_host_that_goes_is_not_kept_waiting_by_an_earlier_loss() -> None:
    link = following(1)
    for now in (10.0, 11.0, 13.0, 16.0, 21.0):
        link.handle(Lost(now))
        link.handle(Tick(now + 4))
    link.handle(Lost(30.0))
    assert not link.handle(Tick(30.1))
    link.handle(Hurry())
    assert link.handle(Tick(30.1))


def test_a_replica_that_is_complete_counts_as_soon_as_the_link_is_back() -> None:
    link = following()
    link.handle(Lost(10.0))
    assert link.complete
    assert link.handle(Tick(12.0))
    link.handle(Accepted(13.0, complete=True))
    assert (link.state, link.complete) == (State.FOLLOWING, True)


def test_without_candidates_nothing_is_tried() -> None:
    link = Link(0)
    assert not link.handle(Begin(0.0))
    assert not link.handle(Tick(1e6))
    assert link.state is State.ABSENT


TIMES = st.floats(0, 1000)
EVENTS: st.SearchStrategy[Event] = st.one_of(
    *(TIMES.map(kind) for kind in (Begin, Accepted, Marked, Lost, Refused)),
    st.builds(Tick, TIMES, st.booleans()),
    st.builds(Accepted, TIMES, st.booleans()),
    st.sampled_from([Overtaken(), Close(), Hurry()]),
)


@given(st.lists(EVENTS, max_size=60), st.integers(0, 4))
def test_any_events_in_any_order(events: list[Event], candidates: int) -> None:
    link = Link(candidates)
    for event in events:
        ended = link.ended
        connect = link.handle(event)
        assert connect == (connect and link.state is State.CONNECTING)
        assert not (ended and connect)
        assert link.at < max(1, candidates)
        if link.state in (State.FOLLOWING, State.BEHIND):
            assert link.complete  # no run relies on a replica that was never complete
        if ended:
            assert link.ended  # permanently
