"""Test the selection over all ranks: every rank picks its share of the partitions that changed most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from scarctl.distributed.global_selection import (
    BINS,
    LEVELS,
    POLICIES,
    TOLERANCE,
    Books,
    Offer,
    Threshold,
    Turn,
    no_offer,
    pick,
    pick_alone,
)
from scarctl.errors import UsageError
from scarctl.policy.select import URGENT, Candidates, Selection, select

policies = st.sampled_from(POLICIES)


@dataclass(frozen=True)
class Rank:
    """The partitions of one rank."""

    distance_sq: NDArray[np.float64]
    nbytes: NDArray[np.int64]
    staleness: NDArray[np.int64]
    eligible: NDArray[np.bool_]

    @property
    def size(self) -> int:
        return self.distance_sq.size


@dataclass
class Ranks:
    """The partitions of all ranks, and what the ranks remember from round to round."""

    ranks: list[Rank]
    budget: int
    """The budget of all ranks."""
    max_staleness: int | None = None
    seed: int = 0
    books: list[Books] = field(default_factory=list)
    spent: list[int] = field(default_factory=list)
    rounds: int = 0
    threshold: Threshold | None = None

    def round(self, policy: str, step: int = 0, credit: int = 0) -> list[NDArray[np.int64]]:
        """Run one round; return what each rank picks."""
        self.books = self.books or [Books() for _ in self.ranks]
        self.spent = self.spent or [0] * len(self.ranks)
        offers = [self.offer(policy, r, step) for r in range(len(self.ranks))]
        turns = [
            Turn(books, offer, budget=budget, spent=spent, credit=credit)
            for books, offer, budget, spent in zip(
                self.books, offers, shares(self.budget, len(self.ranks)), self.spent, strict=True
            )
        ]
        self.rounds, more = 0, {True}
        while more == {True}:
            sent = [turn.send() for turn in turns]
            most = np.max([a for a, _ in sent], axis=0)
            sums = np.sum([b for _, b in sent], axis=0)
            more = {turn.receive(most, sums) for turn in turns}
            self.rounds += 1
        assert more == {False}
        (self.threshold,) = {turn.threshold for turn in turns}
        picked = [pick(offer, turn.threshold) for offer, turn in zip(offers, turns, strict=True)]
        self.spent = [int(rank.nbytes[ids].sum()) for rank, ids in zip(self.ranks, picked, strict=True)]
        assert sum(self.spent) == turns[0].threshold.taken
        return picked

    def offer(self, policy: str, r: int, step: int = 0) -> Offer:
        more = {"seed": self.seed, "step": step, "max_staleness": self.max_staleness}
        return Offer(policy, Candidates(**vars(self.ranks[r]), **more), shard=r)

    def at_once(self, policy: str, credit: int = 0, step: int = 0) -> Selection:
        """Return what one session with all partitions would pick."""
        whole = {
            name: np.concatenate([getattr(rank, name) for rank in self.ranks]) for name in vars(self.ranks[0])
        }
        among = Candidates(**whole, max_staleness=self.max_staleness, step=step)
        return select(policy, among, self.budget, credit=credit)

    def flat(self, picked: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        """Return picks of all ranks as ids of all partitions together."""
        starts = np.cumsum([0, *(rank.size for rank in self.ranks)])
        return np.concatenate([ids + start for ids, start in zip(picked, starts, strict=False)])


def shares(total: int, parts: int) -> list[int]:
    return [total // parts + (i < total % parts) for i in range(parts)]


def rank(distance_sq: Any, nbytes: Any = 1, staleness: Any = 0, eligible: Any = True) -> Rank:
    distance = np.array(distance_sq, dtype=np.float64).reshape(-1)
    spread = lambda value, dtype: np.broadcast_to(np.asarray(value, dtype=dtype), distance.shape).copy()  # noqa: E731
    return Rank(distance, spread(nbytes, np.int64), spread(staleness, np.int64), spread(eligible, bool))


distances = st.sampled_from([0.0, 1.0, 2.0, 3.0, 1e-300, 5e-324, 1e300, np.nan, np.inf]) | st.floats(0, 10)


ordered = st.sampled_from([0.0, 1.0, 2.0, 3.0, np.nan, np.inf]) | st.floats(1e-9, 10)
"""Distances whose scores have histogram bins of their own: those beyond 2**-112 and 2**112 share the last bins."""


@st.composite
def some_ranks(draw: st.DrawFn, distances: st.SearchStrategy[float] = distances) -> Ranks:
    made = []
    for _ in range(draw(st.integers(1, 4))):
        n = draw(st.integers(0, 8))
        array = lambda dtype, values, n=n: draw(hnp.arrays(dtype, n, elements=values))  # noqa: E731
        made.append(
            Rank(
                array(np.float64, distances),
                array(np.int64, st.integers(1, 20)),
                array(np.int64, st.integers(0, 8)),
                array(np.bool_, st.booleans()),
            )
        )
    return Ranks(
        made, draw(st.integers(0, 120)), draw(st.none() | st.integers(1, 8)), draw(st.integers(-5, 2**70))
    )


def keys_of(ranks: Ranks, policy: str) -> NDArray[np.uint64]:
    return np.concatenate([ranks.offer(policy, r).keys for r in range(len(ranks.ranks))])


@given(some_ranks(), policies, st.integers(0, 60))
def test_no_more_than_the_budget_and_never_anything_that_must_not_be_picked(
    ranks: Ranks, policy: str, credit: int
) -> None:
    picked = ranks.round(policy, credit=credit)
    cap = ranks.budget + max((int(r.nbytes.max(initial=0)) for r in ranks.ranks), default=0)
    assert sum(ranks.spent) <= ranks.budget + min(credit, cap)
    assert ranks.rounds <= LEVELS
    for mine, ids in zip(ranks.ranks, picked, strict=True):
        assert (np.diff(ids) > 0).all()
        good = mine.eligible & np.isfinite(mine.distance_sq) & (mine.distance_sq > 0)
        assert good[ids].all()
    assert [b.credit for b in ranks.books] == [min(ranks.books[0].room - sum(ranks.spent), cap)] * len(
        ranks.ranks
    )


@given(some_ranks(), policies, st.integers(0, 60))
def test_it_stops_only_where_something_does_not_fit(ranks: Ranks, policy: str, credit: int) -> None:
    picked = ranks.round(policy, credit=credit)
    room, threshold = ranks.books[0].room, ranks.threshold
    assert threshold is not None
    left = []
    for r, (mine, ids) in enumerate(zip(ranks.ranks, picked, strict=True)):
        offer = ranks.offer(policy, r)
        out = ~np.isin(offer.ids, ids)
        left += list(zip(offer.keys[out].tolist(), mine.nbytes[offer.ids[out]].tolist(), strict=True))
        # Keys between the two differ by less than the histograms distinguish: hashes decide.
        assert all(key >= threshold.low for key in offer.keys[~out].tolist())
    assert all(key < threshold.above for key, _ in left)
    if left:
        assert sum(ranks.spent) + max(size for _, size in left) > room * (1 - TOLERANCE)


@given(some_ranks(ordered), st.integers(0, 60))
def test_priority_picks_what_one_session_would(ranks: Ranks, credit: int) -> None:
    picked = ranks.flat(ranks.round("priority", credit=credit))
    whole = ranks.at_once("priority", credit=credit)
    # Equal keys are ordered by id in one session and by hash among ranks, so compare only where the order is
    # defined.
    keys = np.zeros(sum(r.size for r in ranks.ranks), dtype=np.uint64)
    at = ranks.flat([ranks.offer("priority", r).ids for r in range(len(ranks.ranks))])
    keys[at] = keys_of(ranks, "priority")
    if (
        np.unique(keys[at]).size == at.size and ranks.budget + credit <= 200
    ):  # so that nothing is within the tolerance
        assert picked.tolist() == whole.ids.tolist()
        assert ranks.books[0].credit == whole.credit
    else:
        sure = keys > (keys[whole.ids].min() if whole.ids.size else np.iinfo(np.uint64).max)
        assert set(np.flatnonzero(sure & np.isin(np.arange(keys.size), at)).tolist()) <= set(
            picked.tolist()
        ) or (sum(ranks.spent) > (ranks.budget + credit) * 0.98)


@pytest.mark.parametrize("kind", ["smooth", "equal", "wide", "narrow", "few values", "skewed"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_budget_is_met_within_two_percent(policy: str, kind: str) -> None:
    n = 1000
    rng = np.random.default_rng(n)
    values = {
        "smooth": lambda r: rng.random(n) + 1e-9,
        "equal": lambda r: np.ones(n),
        "wide": lambda r: np.exp(rng.normal(scale=20, size=n)),
        "narrow": lambda r: 1 + 1e-12 * rng.random(n),
        "few values": lambda r: rng.integers(1, 4, n).astype(float),
        "skewed": lambda r: rng.random(n) * 10.0 ** (3 * r),
    }[kind]
    ranks = Ranks(
        [rank(values(r), rng.integers(900, 1100, n), rng.integers(0, 50, n)) for r in range(4)],
        budget=4 * n * 125,
    )
    picked = ranks.round(policy)
    assert 0.98 <= sum(ranks.spent) / ranks.budget <= 1
    if policy in URGENT and kind not in ("equal", "few values"):
        whole = ranks.at_once(policy)
        wrong = np.setxor1d(ranks.flat(picked), whole.ids).size
        # Keys that differ by less than 2**-14 are equal.
        assert wrong <= (0.02 if kind == "narrow" else TOLERANCE) * whole.ids.size + 1


@given(some_ranks(), policies, st.integers(0, 2**39))
def test_the_same_seed_gives_the_same_picks(ranks: Ranks, policy: str, step: int) -> None:
    first = ranks.round(policy, step)
    again = replace(ranks, books=[], spent=[]).round(policy, step)
    assert [a.tolist() for a in first] == [b.tolist() for b in again]


def test_another_seed_or_step_gives_other_random_picks() -> None:
    ranks = Ranks([rank(np.ones(500)) for _ in range(3)], budget=300)
    first = ranks.flat(ranks.round("random", 1))
    for other, step in ((replace(ranks, books=[], seed=1), 1), (replace(ranks, books=[]), 2)):
        assert np.intersect1d(first, other.flat(other.round("random", step))).size < 150
    assert [len(ids) > 50 for ids in ranks.round("random", 3)] == [True] * 3


def test_one_rank_with_everything_and_others_with_nothing() -> None:
    everything = rank(np.arange(1, 101))
    nothing = replace(everything, eligible=np.zeros(100, dtype=bool))
    ranks = Ranks([nothing, everything, rank([]), rank(np.zeros(5))], budget=40)
    picked = ranks.round("priority")
    assert [ids.size for ids in picked] == [0, 40, 0, 0]
    assert picked[1].tolist() == list(range(60, 100))
    assert [books.share for books in ranks.books] == [None, 1.0, None, None]


def test_values_that_are_not_finite_are_told_and_not_picked() -> None:
    ranks = Ranks([rank([np.nan, 1, np.inf], eligible=[True, True, False]), rank([0.0, -0.0])], budget=10)
    assert [ids.tolist() for ids in ranks.round("priority")] == [[1], []]
    assert ranks.offer("priority", 0).nonfinite.tolist() == [0]


def test_credit_lets_a_partition_through_that_is_larger_than_a_budget() -> None:
    ranks = Ranks([rank([1000.0, 1], [100, 1]), rank([2, 3.0])], budget=30)
    taken = [ranks.flat(ranks.round("priority", step)).tolist() for step in range(5)]
    assert taken[:3] == [[], [], []]  # 30, 60, 90: smaller ones do not pass it
    assert taken[3] == [0, 1, 2, 3]


def test_what_was_picked_too_much_is_made_up_for() -> None:
    ranks = Ranks([rank(np.arange(1, 1001)), rank(np.arange(1, 1001))], budget=100)
    ranks.round("priority", 0)
    ranks.spent[0] += 40  # it was late, and picked alone
    ranks.round("priority", 1)
    assert sum(ranks.spent) == 60


def test_the_stalest_of_all_ranks_go_first() -> None:
    ranks = Ranks(
        [rank([9, 9, 0, 1], staleness=[0, 0, 99, 12]), rank([1, 1, 1], staleness=[30, 11, 9])],
        3,
        max_staleness=10,
    )
    assert [ids.tolist() for ids in ranks.round("priority")] == [[3], [0, 1]]
    ranks = replace(ranks, budget=2, books=[], spent=[])
    assert [ids.tolist() for ids in ranks.round("random")] == [[3], [0]]
    ranks = replace(ranks, budget=5, books=[], spent=[])
    assert [ids.tolist() for ids in ranks.round("priority")] == [[0, 1, 3], [0, 1]]


def test_round_goes_through_all_partitions_of_all_ranks() -> None:
    ranks = Ranks([rank(np.ones(40)), rank(np.ones(24))], budget=8)
    seen = np.zeros(64, dtype=int)
    saved_at = np.zeros(64, dtype=int)
    for step in range(1, 25):
        stale = step - saved_at
        ranks.ranks = [
            replace(ranks.ranks[0], staleness=stale[:40]),
            replace(ranks.ranks[1], staleness=stale[40:]),
        ]
        ids = ranks.flat(ranks.round("round", step))
        assert ids.size == 8
        seen[ids] += 1
        saved_at[ids] = step
        if step % 8 == 0:
            assert (seen == step // 8).all()


def test_traffic_does_not_depend_on_the_number_of_partitions() -> None:
    sizes = {
        tuple(
            a.nbytes
            for a in Turn(Books(), Ranks([rank(np.ones(n))], 1).offer("priority", 0), budget=1).send()
        )
        for n in (0, 1, 10_000)
    }
    assert sizes == {(16, 8 * (BINS + 2))}
    assert no_offer().ids.size == 0


@given(some_ranks(), policies)
def test_a_rank_alone_takes_its_own_in_the_same_order(ranks: Ranks, policy: str) -> None:
    one = replace(ranks, ranks=ranks.ranks[:1])
    assert pick_alone(one.offer(policy, 0), one.budget).tolist() == one.round(policy)[0].tolist()


def test_wrong_use_is_told() -> None:
    good = rank([1.0])
    with pytest.raises(UsageError, match="ranks cannot select by policy 'full'"):
        Offer("full", Candidates(**vars(good)), shard=0)
    with pytest.raises(UsageError, match="different shapes"):
        Candidates(**vars(replace(good, nbytes=np.ones(2, dtype=np.int64))))
