"""Test the names of lost parts: one syntax for one process and for ranks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from numpy.typing import NDArray

from scarctl.errors import UsageError
from scarctl.recovery.lost import Lost, find_lost, parse_lost, refuse_unmatched, without_match_anywhere
from scarctl.state.group import Place
from scarctl.state.layout import Layout, TensorSpec, build_layout

SHARDS = 3
NAMES = ["a", "b", "a,b", "x,y,z"]


def whole() -> Layout:
    groups = [
        ("emb.weight", "parameter", (TensorSpec("", "F32", (21, 4)),)),
        ("layers.0.w", "parameter", (TensorSpec("", "F32", (6, 2)),)),
        ("layers.1.w", "parameter", (TensorSpec("", "F32", (6, 2)),)),
        ("step", "buffer", (TensorSpec("", "I64", ()),)),
    ]
    return build_layout(groups, partition_bytes=32)


class Alone:
    """One process, whose state is in three shards."""

    layout = whole()
    shard_of = layout.shards(SHARDS, 0)

    def ids(self, lost: Lost) -> list[int]:
        names = [group.name for group in self.layout.groups]
        found, unmatched = find_lost(parse_lost(lost, names, range(SHARDS)), self.layout, self.shard_of, 0)
        refuse_unmatched([unmatched], names)
        return found.tolist()


class Ranks:
    """Three ranks, which save to the shards 4, 5 and 6. "left" belongs to rank 0 alone, "wide" is divided."""

    world, shards = 3, (4, 5, 6)

    def __init__(self) -> None:
        self.layouts = []
        for rank in range(self.world):
            groups = [("wide", "parameter", (TensorSpec("", "F32", (4, 2)),), Place((12, 2), (4 * rank, 0)))]
            left = [("left", "parameter", (TensorSpec("", "F32", (4, 2)),), None)] if rank == 0 else []
            self.layouts.append(build_layout(groups + left, partition_bytes=16))

    def ids(self, lost: Lost) -> list[list[int]]:
        items = parse_lost(lost, ["wide", "left"], self.shards, self.world)
        found = [
            find_lost(items, layout, np.full(layout.partitions, shard, np.int32), rank)
            for rank, (layout, shard) in enumerate(zip(self.layouts, self.shards, strict=True))
        ]
        refuse_unmatched([unmatched for _, unmatched in found], ["wide", "left"])
        return [ids.tolist() for ids, _ in found]


def test_a_rank_that_asks_no_other_refuses_what_none_can_have() -> None:
    names, layout = ["wide", "left"], Ranks().layouts[1]
    lost = ["wide[0:2]", "wide[0:13]", "left", "left[0:5]", "*[0:13]", "lefd", "lefd[0:1]"]
    items = parse_lost(lost, names, Ranks.shards, Ranks.world)
    _, unmatched = find_lost(items, layout, np.full(layout.partitions, 5, np.int32), 1)
    assert list(without_match_anywhere(unmatched, layout, names)) == ["wide[0:13]", "lefd", "lefd[0:1]"]


def of_shards(*shards: int) -> list[int]:
    return np.flatnonzero(np.isin(Alone.shard_of, shards)).tolist()


@pytest.mark.parametrize(
    ("lost", "shards"),
    [
        ("all", [0, 1, 2]),
        ("1,", [1]),
        (1, [1]),
        (np.int64(1), [1]),
        ("0,2", [0, 2]),
        ("0, 2", [0, 2]),
        ([0, 2], [0, 2]),
        (("0", 2), [0, 2]),
        (["0,1", "2"], [0, 1, 2]),
        ("shard:0,2", [0, 2]),
        ("shard:0,shard:2", [0, 2]),
        ("rank:0", [0, 1, 2]),
        (np.array([1, 2]), [1, 2]),
    ],
)
def test_numbers_are_shards_of_one_process(lost: Lost, shards: list[int]) -> None:
    assert Alone().ids(lost) == of_shards(*shards)


def test_names_and_rows_of_one_process() -> None:
    of, ids = Alone.layout, Alone().ids
    assert ids("layers.*") == [*of.match("layers.0.w"), *of.match("layers.1.w")]
    assert ids("emb.weight[0:3]") == [0, 1]
    assert ids(["step", "emb.weight[20:21]"]) == [10, int(of.match("step")[0])]
    assert ids("layers.0.w,step,1") == sorted({*of.match("layers.0.w"), *of.match("step"), *of_shards(1)})


@pytest.mark.parametrize(
    ("lost", "hint"),
    [
        ("7", "shards are 0..2"),
        ("3,0", "shards are 0..2"),
        ("0,-1", "shards are 0..2"),
        (-1, "shards are 0..2"),
        ("shard:3", "shards are 0..2"),
        ("rank:1", "the only rank is 0"),
        ("layer.*", "layers"),
        ("emb.weight[50:60]", ""),
        ("emb.weight[0:22]", "'emb.weight[0:]'"),
        ("emb.wait[0:2]", "emb.weight"),
        ("rank:x", ""),
        ("9" * 5000, ""),
        ("٣", ""),
        ("", "patterns"),
        (",", "patterns"),
        ([], "patterns"),
    ],
)
def test_what_does_not_exist_is_refused(lost: Lost, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        Alone().ids(lost)
    assert hint in caught.value.hint


def test_a_shard_without_partitions_exists() -> None:
    small = build_layout([("a", "parameter", (TensorSpec("", "F32", (2,)),))])
    found, _ = find_lost(parse_lost("5", ["a"], range(8)), small, small.shards(8, 0), 0)
    assert found.tolist() in ([], [0])


@pytest.mark.parametrize(
    ("lost", "ids"),
    [
        ("all", [[0, 1, 2, 3], [0, 1], [0, 1]]),
        ("1", [[], [0, 1], []]),
        ([2], [[], [], [0, 1]]),
        ("rank:1,2", [[], [0, 1], [0, 1]]),
        ("shard:5", [[], [0, 1], []]),
        ("shard:4,6", [[0, 1, 2, 3], [], [0, 1]]),
        ("left", [[2, 3], [], []]),
        ("left,wide", [[0, 1, 2, 3], [0, 1], [0, 1]]),
        ("wide[5:9]", [[], [0, 1], [0]]),
        ("*[0:12]", [[0, 1, 2, 3], [0, 1], [0, 1]]),  # beyond the last row of left, not of wide
        (["wide[0:1]", "rank:2"], [[0], [], [0, 1]]),
    ],
)
def test_numbers_are_ranks_where_several_save(lost: Lost, ids: list[list[int]]) -> None:
    assert Ranks().ids(lost) == ids


@pytest.mark.parametrize(
    ("lost", "message", "hint"),
    [
        ("3", "rank 3 does not exist", "ranks are 0..2"),
        ("rank:0,4", "rank 4 does not exist", "ranks are 0..2"),
        ("shard:1", "shard 1 does not exist", "shards are 4..6"),
        ("lefd", "matches no group", "left"),
        ("left,lefd[0:1]", "matches no group", "left"),
        ("left[4:9]", "rows are 0:4", ""),  # from the rank that has it
        ("left[0:5]", "ends after the last row: rows are 0:4", "'left[0:]'"),
        ("wide[0:13]", "ends after the last row: rows are 0:12", "'wide[0:]'"),
        ("*[0:13]", "ends after the last row: rows are 0:12", ""),
    ],
)
def test_what_no_rank_has_is_refused(lost: Lost, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        Ranks().ids(lost)
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("lost", "items"),
    [
        ("a,b", ["a,b"]),
        ("a, b", ["a", "b"]),
        (["a", "b"], ["a", "b"]),
        ("b,a,b", ["b", "a,b"]),
        ("a,b,a", ["a,b", "a"]),
        ("a,b[0:2],b", ["a,b[0:2]", "b"]),
        ("x,y,z", ["x,y,z"]),
        ("x,y", ["x", "y"]),
        ("a,,b,", ["a", "b"]),
    ],
)
def test_a_comma_may_belong_to_a_name(lost: Lost, items: Iterable[str]) -> None:
    assert parse_lost(lost, NAMES, range(1)) == [("name", item) for item in items]


def test_a_long_list_is_parsed_quickly() -> None:
    numbers: NDArray[np.int64] = np.arange(100_000)
    assert len(parse_lost(",".join(map(str, numbers)), NAMES, range(100_000))) == 100_000
