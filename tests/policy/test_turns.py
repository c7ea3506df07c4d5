"""Test when the store gets something of memory, and how much: within its bandwidth, and without a queue."""

from __future__ import annotations

import itertools

import pytest

from scarctl.policy.turns import FULL_EVERY, SHARE, Turn, Turns, part_requests

MB = 1_000_000
STATE, PART = 1000 * MB, 100 * MB


class Store:
    """A store that serves one request at a time. Memory changes completely between two of its turns."""

    def __init__(
        self, bandwidth: float, *, pending: int = STATE, commit: float = 0.0, **options: object
    ) -> None:
        self.turns = Turns(state_bytes=STATE, part_bytes=PART, max_lag=30.0, **options)  # type: ignore[arg-type]
        self.bandwidth, self.pending, self.commit = bandwidth, pending, commit
        self.now, self.number, self.done_at = 0.0, 0, -1.0
        self.given: list[tuple[float, Turn, int]] = []

    def run(self, seconds: float, step: float = 0.5) -> Store:
        """Train, with a memory checkpoint after each step of this many seconds."""
        for _ in range(int(seconds / step)):
            self.now += step
            if self.turns.waiting:
                self.turns.look(self.now, [self.number] if self.now < self.done_at else [])
            turn = self.turns.due(self.now, self.pending)
            if turn is not Turn.NOTHING:
                nbytes = self.pending if turn is Turn.WHOLE else PART
                self.number += 1
                self.given.append((self.now, turn, nbytes))
                self.done_at = self.now + self.commit + nbytes / self.bandwidth
                self.turns.asked(self.now, self.number, nbytes, int(self.now / step), turn)
        return self


def test_a_small_state_reaches_the_store_whole_every_max_lag() -> None:
    store = Store(100 * MB).run(200)
    assert {turn for _, turn, _ in store.given} == {Turn.WHOLE}
    times = [now for now, _, _ in store.given]
    assert [b - a for a, b in itertools.pairwise(times)] == [30.0] * (len(times) - 1)
    assert len(times) == 7
    assert store.turns.small
    assert store.turns.turn_seconds == 30


def test_of_a_large_state_parts_follow_one_another_and_now_and_then_a_whole_one() -> None:
    store = Store(10 * MB).run(10_000)
    wholes = [now for now, turn, _ in store.given if turn is Turn.WHOLE]
    assert wholes[1] - wholes[0] == pytest.approx(FULL_EVERY * 100 / SHARE, rel=0.05)
    sent = sum(nbytes for now, _, nbytes in store.given)
    assert sent / 10_000 == pytest.approx(SHARE * 10 * MB, rel=0.1), (
        "the store is always busy, but for a reserve"
    )
    assert not store.turns.small
    assert store.turns.turn_seconds == pytest.approx(100 / SHARE, rel=0.1)


def test_a_large_state_of_which_little_changes_is_like_a_small_one() -> None:
    store = Store(10 * MB).run(200)
    store.pending = 50 * MB
    store.given.clear()
    store.run(1000)
    assert {turn for _, turn, _ in store.given} == {Turn.WHOLE}
    assert len(store.given) == pytest.approx(1000 / 30, abs=4)


def test_policy_full_gives_nothing_but_whole_states() -> None:
    store = Store(10 * MB, whole=True).run(2000)
    assert {turn for _, turn, _ in store.given} == {Turn.WHOLE}
    assert len(store.given) == pytest.approx(2000 * SHARE / 100, abs=2)


def test_the_bandwidth_of_the_user_counts_though_the_store_is_faster() -> None:
    store = Store(1000 * MB, max_bandwidth=5 * MB).run(20_000)
    assert sum(nbytes for _, _, nbytes in store.given[1:]) / 20_000 == pytest.approx(5 * MB, rel=0.1)


def test_a_turn_in_two_encodings_takes_the_time_of_both() -> None:
    turns = Turns(state_bytes=STATE, part_bytes=PART, max_lag=1.0, max_bandwidth=10 * MB)
    for number, nbytes in ((1, 80 * MB), (2, 20 * MB)):
        turns.asked(0.0, number, nbytes, 5, Turn.PART)
    turns.look(1.0, ())
    assert turns.due(9.9, STATE) is Turn.NOTHING
    assert turns.due(10.1, STATE) is not Turn.NOTHING


def test_only_large_hand_overs_show_the_bandwidth() -> None:
    turns = Turns(state_bytes=STATE, part_bytes=PART, max_lag=30.0)
    turns.asked(0.0, 1, PART // 5, 1, Turn.PART)
    turns.look(10.0, ())
    assert turns.bandwidth is None
    turns.asked(20.0, 2, PART, 2, Turn.PART)
    turns.look(29.0, [2])
    turns.look(31.0, ())
    assert turns.bandwidth == pytest.approx(10 * MB), "it ended between the two looks"


def test_nothing_is_due_while_something_waits_or_if_nothing_is_pending() -> None:
    turns = Turns(state_bytes=STATE, part_bytes=PART, max_lag=30.0)
    assert turns.due(0.0, 0) is Turn.NOTHING
    assert turns.due(0.0, STATE) is Turn.WHOLE
    for number, step in ((3, 7), (4, 9)):
        turns.asked(0.0, number, MB, step, Turn.PART)
    assert turns.due(1e6, STATE) is Turn.NOTHING
    assert (turns.steps(), turns.waiting_bytes) == ([(3, 7), (4, 9)], 2 * MB)
    turns.look(1e6, [4])
    assert turns.steps() == [(4, 9)]
    turns.replaced([4, 99])
    assert turns.due(1e6, STATE) is Turn.WHOLE
    assert not turns.waiting


def test_soon_means_at_once() -> None:
    store = Store(1000 * MB).run(35)
    assert store.turns.due(store.now, STATE) is Turn.NOTHING
    store.turns.soon()
    assert store.turns.due(store.now, STATE) is Turn.WHOLE


def test_a_part_is_as_large_as_the_store_takes_until_memory_is_up_to_date_again() -> None:
    made = Turns(state_bytes=1000, part_bytes=100, max_lag=1.0, max_bandwidth=20.0)
    assert made.room(1.0) == 100
    assert made.room(30.0) == 600
    assert made.room(300.0) == 1000
    assert Turns(state_bytes=1000, part_bytes=100, max_lag=1.0).room(30.0) == 100


def test_what_a_store_gets_in_a_day() -> None:
    turns = Turns(state_bytes=30 * MB, part_bytes=4 * MB, max_lag=30.0)
    assert not turns.known
    turns.bandwidth = 100.0 * MB
    assert (turns.known, turns.bound) == (True, "bandwidth")
    assert turns.daily == (2880 * 30 * MB, 2880 * 32)
    assert turns.told == "the whole state every 30 s: up to 80.5 GiB and about 92,160 requests per day"
    large = Turns(state_bytes=STATE, part_bytes=PART, max_lag=30.0, max_bandwidth=10.0 * MB)
    large.bandwidth = 100.0 * MB
    assert (large.known, large.bound) == (True, "max_bandwidth")
    assert large.daily == (8640 * PART, 8640 * 13)
    assert part_requests(STATE // 4, STATE) == 2 * 13, "a large part has several commits"
    assert large.told.startswith("what changed most, all of the state in about 100 s: up to 804.7 GiB and ")
    assert large.due(0.0, STATE // 2) is Turn.WHOLE, "the first"
    assert large.backlog_seconds == 50.0
