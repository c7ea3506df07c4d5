"""Test from which step ranks continue if they come back with states of different steps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scarctl.distributed.resume_step import (
    MAX_APART,
    RankState,
    agree_on_step,
    perturbation_of,
    rework_of_ranks,
)
from scarctl.theory.convergence import Convergence
from scarctl.theory.rework import Outlook


def alive(step: int) -> RankState:
    return RankState(step, survived=True, whole="a")


def dead(step: int, distance: float | None = None) -> RankState:
    return RankState(step, survived=False, distance=distance)


def test_after_a_clean_end_all_go_on_where_they_were() -> None:
    found = agree_on_step([RankState(7, survived=False, whole="a")] * 3)
    assert (found.step, found.lost, found.label.of_one) == (7, (), True)


def test_survivors_keep_their_progress_and_a_lost_rank_joins_them() -> None:
    found = agree_on_step([alive(47), dead(40), alive(47)])
    assert (found.step, found.reference, found.lost, found.label.of_one) == (47, 0, (1,), False)


def test_a_survivor_that_is_one_iteration_ahead_waits_and_is_not_exact() -> None:
    found = agree_on_step([alive(48), alive(47), alive(48)])
    assert (found.step, found.reference, found.lost, found.label.of_one) == (47, 1, (), False)


def test_an_arena_of_an_earlier_run_does_not_pull_the_others_back() -> None:
    found = agree_on_step([alive(3), alive(47)])
    assert (found.step, found.reference, found.lost) == (47, 1, (0,))


def test_what_survived_may_be_in_the_store_instead_of_memory() -> None:
    found = agree_on_step([RankState(17, survived=False, whole="a"), dead(15)])
    assert (found.step, found.reference, found.lost) == (17, 0, (1,))


def test_without_survivors_all_go_on_from_the_newest_step_that_is_known() -> None:
    found = agree_on_step([dead(50), dead(40), dead(50)])
    assert (found.step, found.reference, found.lost, found.label.of_one) == (50, 0, (1,), False)
    found = agree_on_step([dead(50), dead(49), dead(40)])
    assert (found.step, found.reference, found.lost, found.label.of_one) == (49, 1, (2,), False)


def test_a_rank_of_which_nothing_changes_does_not_set_the_others_back() -> None:
    """The rank has saved extras once, with its first state, which has not changed since."""
    found = agree_on_step([RankState(1, survived=False, whole="a"), dead(1000), dead(1000)])
    assert (found.step, found.reference, found.lost, found.label.of_one) == (1000, 1, (0,), False)


def test_a_rank_that_owns_nothing_decides_nothing() -> None:
    nothing = RankState(-1, survived=False, owns=False)
    found = agree_on_step([nothing, dead(40), dead(50)])
    assert (found.step, found.reference, found.lost, found.label.of_one) == (50, 2, (1,), False)
    found = agree_on_step([nothing, dead(40), alive(50)])
    assert (found.step, found.reference, found.lost) == (50, 2, (1,))


def test_a_rank_that_is_exactly_where_the_survivors_are_has_lost_nothing() -> None:
    found = agree_on_step([alive(47), RankState(47, survived=False, whole="a")])
    assert (found.lost, found.label.of_one) == ((), True)


def test_the_perturbation_is_known_as_far_as_the_lost_ranks_distances_are() -> None:
    ranks = [alive(47), dead(40, 3.0), dead(40, 4.0)]
    assert perturbation_of(ranks, agree_on_step(ranks)).to_json() == {"value": 5.0, "kind": "estimated"}
    ranks = [alive(47), dead(40, 3.0), dead(40)]
    assert perturbation_of(ranks, agree_on_step(ranks)).kind == "unknown"


def test_what_a_lost_rank_did_after_its_distance_was_measured_counts() -> None:
    """Its memory is a replica, which was cut off at a flush: the state equalled its copies then, and moved on since."""
    outlook = Outlook(60, Convergence(0.98, (0.97, 0.99), 10.0, (9.0, 11.0), 20, ((0.98, 9.0, 11.0),)))

    def predicted(head: int) -> float:
        ranks = [alive(60), RankState(28, survived=False, distance=0.0, head=head)]
        found = rework_of_ranks(ranks, agree_on_step(ranks), outlook, comparable=True)
        assert found.iterations is not None
        return found.iterations

    assert predicted(60) == 0.0
    assert predicted(28) > predicted(50) > 0.0
    for head, kind in ((28, "unknown"), (43, "unknown"), (44, "estimated"), (60, "estimated")):
        ranks = [alive(60), RankState(28, survived=False, distance=1.0, head=head)]
        assert perturbation_of(ranks, agree_on_step(ranks)).kind == kind, head


standings = st.builds(RankState, st.integers(0, 60), st.booleans(), whole=st.sampled_from(["", "a"]))


@given(st.lists(standings, min_size=1, max_size=9))
def test_the_step_is_that_of_a_rank_which_has_extras_for_it(ranks: list[RankState]) -> None:
    found = agree_on_step(ranks)
    assert ranks[found.reference].step == found.step
    assert found.reference not in found.lost
    assert found.label.of_one is all(rank.whole == "a" and rank.step == found.step for rank in ranks)
    survivors = [rank.step for rank in ranks if rank.survived]
    newest = max(survivors or [rank.step for rank in ranks])
    assert newest - MAX_APART <= found.step <= newest
    if not survivors and any(rank.whole and rank.step == newest for rank in ranks):
        assert found.step == newest
