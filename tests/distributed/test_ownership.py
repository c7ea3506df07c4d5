"""Test the division of a state among ranks: every element has one owner, whatever the boxes."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scarctl.distributed.ownership import WHOLE_BYTES, Division, Holding, divide
from scarctl.errors import UsageError
from scarctl.state.group import DTYPES, Place

Holdings = list[list[Holding]]


def parameter(name: str, *shape: int, role: str = "shared", scope: str = "", dtype: str = "F32") -> Holding:
    return Holding(name, "parameter", role, dtype, shape, None, scope)


def box(name: str, whole: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...]) -> Holding:
    return Holding(name, "parameter", "shared", "F32", shape, Place(whole, offset))


def owners(holdings: Holdings, division: Division) -> dict[str, np.ndarray]:
    """Return the owner of every element, by stored name. Fails if an element has several."""
    found: dict[str, np.ndarray] = {}
    for rank, own in enumerate(division.owned):
        for owned in own:
            held = holdings[rank][owned.group]
            rows = held.shape[0] if held.shape else 1
            assert 0 <= owned.start < owned.stop <= rows
            whole = held.whole
            place = owned.place or Place(whole, (0,) * len(whole))
            assert place.shape == whole
            shape = (owned.stop - owned.start, *held.shape[1:]) if held.shape else ()
            assert owned.place is not None or shape == whole
            owner = found.setdefault(owned.name, np.full(whole, -1))
            part = tuple(slice(o, o + n) for o, n in zip(place.offset, shape, strict=True))
            assert (owner[part] == -1).all(), owned.name
            owner[part] = rank
    return found


@st.composite
def cuts(draw: st.DrawFn, size: int, parts: int) -> list[int]:
    """Return the bounds of `parts` ranges of 0..size, some of them empty."""
    return [0, *sorted(draw(st.integers(0, size)) for _ in range(parts - 1)), size]


@st.composite
def jobs(draw: st.DrawFn) -> Holdings:
    """Draw ranks on a mesh of three dimensions (replicas, rows, columns), with tensors cut along any of them."""
    copies, by_row, by_column = (draw(st.integers(1, 3)) for _ in range(3))
    ranks = [(c, i, j) for c in range(copies) for i in range(by_row) for j in range(by_column)]
    holdings: Holdings = [[] for _ in ranks]
    for t in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(["parameter", "parameter", "buffer"]))
        dtype = draw(st.sampled_from(["F32", "BF16", "I64"]))
        shape = (draw(st.sampled_from([0, 1, 7, 300, 40_000])), draw(st.sampled_from([1, 5, 64])))
        if draw(st.integers(0, 5)) == 0:
            own = draw(st.booleans())
            for rank, held in enumerate(holdings):
                role = "own" if own else "shared" if rank == len(ranks) - 1 else "replica"
                held.append(Holding(f"t{t}", kind, role, dtype, ()))
            continue
        rows = draw(cuts(shape[0], by_row)) if draw(st.booleans()) else None
        columns = draw(cuts(shape[1], by_column)) if draw(st.booleans()) else None
        for rank, (_, i, j) in enumerate(ranks):
            a, b = (rows[i], rows[i + 1]) if rows else (0, shape[0])
            c, d = (columns[j], columns[j + 1]) if columns else (0, shape[1])
            part = (b - a, d - c)
            place = Place(shape, (a, c)) if part != shape or draw(st.booleans()) else None
            holdings[rank].append(Holding(f"t{t}", kind, "shared", dtype, part, place))
    return holdings


@given(jobs())
def test_every_element_has_one_owner(holdings: Holdings) -> None:
    division = divide(holdings)
    found = owners(holdings, division)
    for name, owner in found.items():
        assert (owner >= 0).all(), name
    elements = {
        name: math.prod(holding.whole)
        for held, names in zip(holdings, division.names, strict=True)
        for holding, name in zip(held, names, strict=True)
    }
    assert {name: owner.size for name, owner in found.items()} == {
        n: size for n, size in elements.items() if size
    }


@given(jobs())
def test_what_ranks_share_is_divided_evenly(holdings: Holdings) -> None:
    shared: dict[tuple[int, ...], dict[int, int]] = {}
    largest: dict[tuple[int, ...], int] = {}
    division = divide(holdings)
    for copy in division.copies:
        ranks = copy.holders.sharing
        held = holdings[copy.owner][copy.holders.groups[copy.owner]]
        if held.kind == "parameter" and len(ranks) > 1:
            owned = shared.setdefault(ranks, dict.fromkeys(ranks, 0))
            owned[copy.owner] += (copy.stop - copy.start) * held.row_bytes
            largest[ranks] = max(largest.get(ranks, WHOLE_BYTES), held.row_bytes)
    for ranks, owned in shared.items():
        assert max(owned.values()) - min(owned.values()) <= 2 * largest[ranks]


@given(jobs(), st.randoms())
def test_the_division_depends_on_nothing_but_what_the_ranks_hold(
    holdings: Holdings, rng: random.Random
) -> None:
    division = divide(holdings)
    again = [[Holding.from_json(holding.to_json()) for holding in held] for held in holdings]
    assert again == holdings
    assert divide(again) == division
    orders = [rng.sample(range(len(held)), len(held)) for held in holdings]
    shuffled = divide([[held[g] for g in order] for held, order in zip(holdings, orders, strict=True)])
    for own, other, order in zip(division.owned, shuffled.owned, orders, strict=True):
        assert sorted(o[1:4] for o in own) == sorted(o[1:4] for o in other)
        assert {o.group for o in own} == {order[o.group] for o in other}


@given(jobs())
def test_copies_are_all_that_others_hold(holdings: Holdings) -> None:
    division = divide(holdings)
    filled = [[np.zeros(held.shape, dtype=bool) for held in rank] for rank in holdings]
    for rank, own in enumerate(division.owned):
        for owned in own:
            np.atleast_1d(filled[rank][owned.group])[owned.start : owned.stop] = True
    for copy in division.copies:
        assert list(copy.holders.groups) == sorted(copy.holders.groups)
        for rank, group in copy.holders.groups.items():
            target = filled[rank][group]
            part = np.atleast_1d(target)[copy.start : copy.stop]
            assert part.all() if rank == copy.owner else not part.any()
            part[...] = True
    assert all(part.all() for rank in filled for part in rank)


@given(jobs(), st.data())
def test_a_box_that_is_lost_or_moved_is_noticed(holdings: Holdings, data: st.DataObject) -> None:
    division = divide(holdings)
    lone = [
        (rank, owned.group)
        for rank, own in enumerate(division.owned)
        for owned in own
        if owned.place is not None
        and (held := holdings[rank][owned.group]).shape != held.whole
        and not any(copy.holders.groups.get(rank) == owned.group for copy in division.copies)
    ]
    if not lone:
        return
    rank, group = data.draw(st.sampled_from(lone))
    held = holdings[rank][group]
    assert held.place is not None
    moved = [list(each) for each in holdings]
    shift = [
        o + 1 if o + n < w else o - 1 if o else o
        for o, n, w in zip(held.place.offset, held.shape, held.whole, strict=True)
    ]
    moved[rank][group] = box(held.name, held.whole, tuple(shift), held.shape)
    moved[rank][group] = Holding(
        held.name, held.kind, held.role, held.dtype, held.shape, moved[rank][group].place
    )
    with pytest.raises(UsageError, match=r"overlap|no rank holds"):
        divide(moved)
    del moved[rank][group]
    with pytest.raises(UsageError, match="no rank holds"):
        divide(moved)


def test_tensors_of_one_name_that_are_each_ranks_own() -> None:
    division = divide(
        [[parameter("a", 3, role="own")], [parameter("a", 5, role="own"), parameter("b", 2, role="own")]]
    )
    assert division.names == (("a@0",), ("a@1", "b"))
    assert [[o.name for o in own] for own in division.owned] == [["a@0"], ["a@1", "b"]]
    assert division.copies == ()


def test_scopes_keep_tensors_of_one_name_apart() -> None:
    left, right = parameter("w", 40_000, scope="0+2"), parameter("w", 30_000, scope="2+2")
    division = divide([[left], [left], [right], [right]])
    assert [[(o.name, o.start, o.stop) for o in own] for own in division.owned] == [
        [("w@0", 0, 20_000)], [("w@0", 20_000, 40_000)], [("w@2", 0, 15_000)], [("w@2", 15_000, 30_000)],
    ]  # fmt: skip


def test_the_rank_with_the_slots_owns_what_others_have_replicas_of() -> None:
    division = divide([[parameter("w", 99_999, role="replica")], [parameter("w", 99_999)]])
    assert division.owned == ((), ((0, "w", 0, 99_999, None),))
    (copy,) = division.copies
    assert (copy.owner, dict(copy.holders.groups), copy.holders.sharing) == (1, {0: 0, 1: 0}, (1,))


def test_small_tensors_and_buffers_are_not_divided() -> None:
    small = parameter("small", WHOLE_BYTES // 4 - 1)
    buffer = Holding("buffer", "buffer", "shared", "F32", (1 << 20,))
    division = divide([[small, buffer]] * 3)
    assert sorted(o for own in division.owned for o in own) == [(0, "small", 0, WHOLE_BYTES // 4 - 1, None),
                                                               (1, "buffer", 0, 1 << 20, None)]  # fmt: skip
    assert (1, "buffer", 0, 1 << 20, None) in division.owned[0]


@pytest.mark.parametrize(
    ("holdings", "message"),
    [
        ([[parameter("w", 4)], [parameter("w", 5)]], r"'w' .*F32 \[4\] on rank 0 and .*\[5\] on rank 1"),
        ([[parameter("w", 4)], [parameter("w", 4, dtype="F16")]], "ranks with different models"),
        ([[parameter("w", 4, role="replica")]] * 2, "'w': ranks 0, 1 have replicas, but no rank owns it"),
        ([[parameter("w", 4), parameter("w", 4)]], "rank 0 has two tensors of the name 'w'"),
        ([[parameter("w", 4), parameter("w@1", 4)], [parameter("w", 4, role="own")]], "stored as 'w@1'"),
        ([[box("w", (9,), (0,), (5,))], [box("w", (9,), (4,), (5,))]], "ranks 0, 1 hold .*'w' that overlap"),
        ([[box("w", (9,), (0,), (4,))], [box("w", (9,), (5,), (4,))]], "'w' has elements that no rank holds"),
        # A pinwheel around a hole, whose boxes fill the volume only if another one is counted twice.
        ([[box("w", (3, 3), (0, 0), (1, 2))], [box("w", (3, 3), (0, 2), (2, 1))], [box("w", (3, 3), (2, 1), (1, 2))],
          [box("w", (3, 3), (1, 0), (2, 1))]], "no rank holds"),
        ([[box("w", (2, 2), (0, 0), (2, 1))], [box("w", (2, 2), (0, 0), (1, 2))]], "overlap"),
    ],
)  # fmt: skip
def test_holdings_that_are_no_state(holdings: Holdings, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        divide(holdings)


def test_a_pinwheel_is_a_whole() -> None:
    boxes = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    holdings = [[box("w", (3, 3), offset, shape)] for offset, shape in boxes]
    assert (owners(holdings, divide(holdings))["w"] == [[0, 0, 1], [3, 4, 1], [3, 2, 2]]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ""}, "cannot be a tensor's name"),
        ({"name": 7}, "name of a holding is not of type str"),
        ({"kind": "scheduler"}, "neither parameter nor buffer"),
        ({"role": "owner"}, "has the role 'owner'"),
        ({"dtype": "F31"}, "unknown dtype"),
        ({"shape": [3, -1]}, "impossible shape"),
        ({"shape": [True]}, "not integers"),
        ({"place": [[4]]}, "not a shape and an offset"),
        ({"place": [[4], ["0"]]}, "not integers"),
        ({"place": [[4], 0]}, "not a shape and an offset"),
        ({"place": [[4], [2]]}, "does not lie within"),
        ({"scope": None}, "scope of a holding is not of type str"),
        ({"more": 1}, "the fields of a holding are not"),
    ],
)
def test_a_holding_from_another_rank_is_checked(change: dict[str, object], message: str) -> None:
    obj = parameter("w", 3).to_json()
    assert Holding.from_json(obj) == parameter("w", 3)
    with pytest.raises(UsageError, match=message):
        Holding.from_json(obj | change)
    with pytest.raises(UsageError, match="the fields of a holding are not"):
        Holding.from_json([])


def test_two_thousand_ranks() -> None:
    ranks, row = 2000, 1 << 10
    shape = (40, row)
    whole = (40 * ranks, row)
    division = divide(
        [
            [box(f"layers.{t}.weight", whole, (40 * rank, 0), shape) for t in range(20)]
            for rank in range(ranks)
        ]
    )
    assert all(len(own) == 20 for own in division.owned)
    shared = divide([[parameter(f"layers.{t}.weight", 4096, row) for t in range(20)]] * ranks)
    sizes = [sum((o.stop - o.start) * row * DTYPES["F32"] for o in own) for own in shared.owned]
    assert max(sizes) - min(sizes) <= 2 * WHOLE_BYTES
