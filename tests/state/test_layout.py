"""Test layouts: partitions, shards, names and patterns, and how a state is cut."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from scarctl.errors import UsageError
from scarctl.state.layout import DTYPES, Group, Layout, TensorSpec, build_layout
from tests.state.layouts import group, groups, layouts, model, rows

# --- partitions -----------------------------------------------------------------------------------------------


@given(layouts)
def test_partitions_tile_the_rows_of_every_group(layout: Layout) -> None:
    ids = np.arange(layout.partitions)
    owner = layout.group_of(ids)
    starts, stops = layout.row_ranges(ids)
    assert layout.base[0] == 0
    for g, one in enumerate(layout.groups):
        mine = np.flatnonzero(owner == g)
        assert mine.tolist() == list(range(layout.base[g], layout.base[g + 1]))
        assert mine.size == one.partitions
        tiles = [row for i in mine for row in range(starts[i], stops[i])]
        assert tiles == (list(range(one.rows)) if one.nbytes else [])
        assert all(stops[i] - starts[i] == one.rows_per_partition for i in mine[:-1])
        assert (layout.partition_bytes[mine] == (stops - starts)[mine] * one.row_bytes).all()
    assert layout.partition_bytes.sum() == layout.nbytes == sum(one.nbytes for one in layout.groups)
    assert layout.partition_bytes.dtype == starts.dtype == stops.dtype == owner.dtype == np.int64


@given(layouts, st.data())
def test_ids_in_any_order_and_shape(layout: Layout, data: st.DataObject) -> None:
    if not layout.partitions:
        return
    ids = np.array(data.draw(st.lists(st.integers(0, layout.partitions - 1), max_size=40)), dtype=np.int64)
    every = np.arange(layout.partitions)
    assert (layout.group_of(ids) == layout.group_of(every)[ids]).all()
    for one, all_of_it in zip(layout.row_ranges(ids), layout.row_ranges(every), strict=True):
        assert (one == all_of_it[ids]).all()
    assert layout.group_of(ids[:, None]).shape == layout.row_ranges(ids[:, None])[1].shape == (ids.size, 1)


def test_group_of_many_ascending_ids_with_repeats() -> None:
    layout = model()
    ids = np.repeat(np.arange(layout.partitions), 5)
    assert (layout.group_of(ids) == [layout.group_of([i])[0] for i in ids]).all()


@pytest.mark.parametrize("unknown", [-1, model().partitions, 2**62])
def test_unknown_ids(unknown: int) -> None:
    layout = model()
    for call in (layout.name, lambda i: layout.group_of([i]), lambda i: layout.row_ranges([0, i])):
        with pytest.raises(IndexError):
            call(unknown)


def test_names() -> None:
    layout = model()
    assert [layout.name(i) for i in range(layout.partitions)] == [
        "emb.weight[0:3]",
        "emb.weight[3:6]",
        "emb.weight[6:9]",
        "emb.weight[9:10]",
        "layers.0.weight[0:2]",
        "layers.0.weight[2:4]",
        "layers.0.weight[4:6]",
        "layers.0.bias[0:6]",
        "scale[0:1]",
        "mean[0:6]",
    ]
    assert layout.groups[0].key(0) == "emb.weight"
    assert layout.groups[0].key(2) == "emb.weight/exp_avg_sq"


def test_arrays_cannot_be_changed() -> None:
    layout = model()
    for array in (layout.base, layout.partition_bytes):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_dtypes_are_those_of_safetensors() -> None:
    for name, size in DTYPES.items():
        header = json.dumps({"x": {"dtype": name, "shape": [3], "data_offsets": [0, 3 * size]}}).encode()
        deserialize(len(header).to_bytes(8, "little") + header + bytes(3 * size))
    header = b'{"x":{"dtype":"?","shape":[],"data_offsets":[0,1]}}'
    with pytest.raises(SafetensorError) as error:
        deserialize(len(header).to_bytes(8, "little") + header + b"0")
    known = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", str(error.value)))
    assert known - set(DTYPES) <= {"F4", "F6_E2M3", "F6_E3M2"}, "a whole-byte dtype is missing"


# --- shards ---------------------------------------------------------------------------------------------------


@given(st.integers(1, 300), st.integers(1, 400), st.integers(-(2**70), 2**70))
def test_shards_are_balanced_and_reproducible(partitions: int, count: int, seed: int) -> None:
    shards = rows(partitions).shards(count, seed)
    assert shards.dtype == np.int32
    sizes = np.bincount(shards, minlength=count)
    assert sizes.size == count
    assert sizes.max() - sizes.min() <= 1
    assert (shards == rows(partitions).shards(count, seed)).all()


def test_shards_depend_on_ids_only() -> None:
    one, many = rows(10), Layout([group(f"g{i}", 2) for i in range(5)])
    assert (one.shards(4, 1) == many.shards(4, 1)).all()


def test_shards_never_change() -> None:
    # Stores keep the seed but not the assignment: these values must never change.
    assert rows(16).shards(4, 0).tolist() == [3, 1, 0, 3, 0, 1, 0, 3, 0, 3, 1, 2, 2, 2, 2, 1]
    assert rows(16).shards(4, 1).tolist() == [3, 1, 1, 3, 0, 2, 1, 0, 1, 3, 2, 2, 3, 0, 0, 2]
    assert rows(5).shards(8, 7).tolist() == [1, 0, 4, 3, 2]
    big = rows(100_000).shards(7, 12345)
    assert big[[0, 1, 2, 32767, 32768, 65536, 99_999]].tolist() == [3, 3, 3, 1, 2, 2, 4]
    assert rows(3).shards(1, 5).tolist() == [0, 0, 0]
    assert Layout([]).shards(8, 0).tolist() == []


def test_shards_are_as_random_as_they_should_be() -> None:
    same = (rows(10_000).shards(8, 1) == rows(10_000).shards(8, 2)).mean()
    assert same == pytest.approx(1 / 8, abs=0.02)
    neighbours = rows(10_000).shards(8, 1)
    assert (neighbours[1:] == neighbours[:-1]).mean() == pytest.approx(1 / 8, abs=0.02)


@pytest.mark.parametrize("count", [0, -1, 2**31])
def test_bad_shard_counts(count: int) -> None:
    with pytest.raises(UsageError, match="shards"):
        rows(4).shards(count, 0)


# --- patterns -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("emb.weight", ["emb.weight[0:3]", "emb.weight[3:6]", "emb.weight[6:9]", "emb.weight[9:10]"]),
        ("emb.weight[3:6]", ["emb.weight[3:6]"]),
        ("emb.weight[2:4]", ["emb.weight[0:3]", "emb.weight[3:6]"]),
        ("emb.weight[9:]", ["emb.weight[9:10]"]),
        ("emb.weight[:1]", ["emb.weight[0:3]"]),
        ("emb.weight[8:10]", ["emb.weight[6:9]", "emb.weight[9:10]"]),
        ("layers.0.*[5:6]", ["layers.0.weight[4:6]", "layers.0.bias[0:6]"]),
        ("s?ale", ["scale[0:1]"]),
        ("[ms]*", ["scale[0:1]", "mean[0:6]"]),
        ("scale[0:1]", ["scale[0:1]"]),
    ],
)
def test_match(pattern: str, names: list[str]) -> None:
    layout = model()
    assert [layout.name(i) for i in layout.match(pattern)] == names
    layout.check_rows(pattern)


@pytest.mark.parametrize(
    ("pattern", "last"), [("emb.weight[8:11]", 10), ("layers.0.*[:7]", 6), ("scale[0:2]", 1)]
)
def test_rows_beyond_the_last(pattern: str, last: int) -> None:
    with pytest.raises(UsageError, match=f"ends after the last row: rows are 0:{last}"):
        model().check_rows(pattern)
    model().check_rows(pattern.replace("[", ".[").replace("*", "?"))  # no group
    model().check_rows(f"*[0:{last}]")


@given(layouts)
def test_every_name_and_group_matches_itself(layout: Layout) -> None:
    names = {one.name for one in layout.groups}
    for i in range(layout.partitions):
        if layout.name(i) not in names:
            assert layout.match(layout.name(i)).tolist() == [i]
    for g, one in enumerate(layout.groups):
        if one.partitions:
            assert layout.match(one.name).tolist() == list(range(layout.base[g], layout.base[g + 1]))


def test_a_name_with_brackets_goes_before_its_meaning_as_a_pattern() -> None:
    layout = Layout([group("a[0:1]", 2), group("a", 3), group("b[x]", 2), group("a1", 1)])
    assert layout.match("a[0:1]").tolist() == [0, 1]
    assert layout.match("a[1:2]").tolist() == [3]  # rows, and not the group a1
    assert layout.match("b[x][1:2]").tolist() == [6]


@pytest.mark.parametrize(
    ("pattern", "message", "hint"),
    [
        ("emb.wieght", "matches no group", "did you mean 'emb.weight'"),
        ("emb.wieght[0:3]", "matches no group", "did you mean 'emb.weight'"),
        ("emb.weight[10:12]", "rows are 0:10", "emb.weight"),
        ("emb.weight[5:5]", "matches no rows", "emb.weight"),
        ("empty", "it is empty", "empty"),
        ("", "matches no group", "known names are 'emb.weight'"),
    ],
)
def test_match_nothing(pattern: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        model().match(pattern)
    assert hint in error.value.hint


# --- building -------------------------------------------------------------------------------------------------


def parameter(
    name: str, *shape: int, slots: tuple[str, ...] = ("",)
) -> tuple[str, str, tuple[TensorSpec, ...]]:
    return name, "parameter", tuple(TensorSpec(slot, "F32", shape) for slot in slots)


@given(groups(), st.one_of(st.none(), st.integers(1, 500)))
def test_built_partitions_are_at_most_partition_bytes(found: list[Group], size: int | None) -> None:
    layout = build_layout([(one.name, one.kind, one.tensors) for one in found], partition_bytes=size)
    limit = size or 4096
    for one in layout.groups:
        full = one.rows_per_partition * one.row_bytes
        assert full <= limit or one.rows_per_partition == 1
        assert one.partitions <= 1 or full + one.row_bytes > limit
        assert one.rows_per_partition <= max(1, one.rows)


def test_default_partition_bytes() -> None:
    def rows_of(*shape: int) -> int:
        return build_layout([parameter("x", *shape)]).groups[0].rows_per_partition

    assert rows_of(4096, 64) * 256 == 4 << 10  # 1 MiB of state: the least
    assert rows_of(1 << 18, 256) * 1024 == 256 << 10  # 256 MiB: a 1024th
    assert rows_of(1 << 24, 1024) * 4096 == 1 << 20  # 64 GiB: the most


def test_rows_by_pattern() -> None:
    state = [parameter("emb.a", 100, 4), parameter("emb.b", 5, 4), parameter("head", 100, 4)]
    layout = build_layout(state, rows={"emb.b": 50, "emb.*": 2}, by_layer=True)
    assert [one.rows_per_partition for one in layout.groups] == [2, 5, 100]
    with pytest.raises(UsageError, match=r"'embb\.\*' matches no group") as error:
        build_layout(state, rows={"embb.*": 2})
    assert "emb.a" in error.value.hint


def test_equal_cuts_are_equal_layouts() -> None:
    state = [parameter("a", 10, 4), parameter("b")]
    whole = build_layout(state, by_layer=True)
    assert whole == build_layout(state, partition_bytes=1 << 30) == build_layout(state, rows={"*": 99})
    assert whole != build_layout(state, rows={"a": 5})


@pytest.mark.parametrize(
    ("state", "arguments", "message"),
    [
        ([parameter("a", 2), parameter("a", 3)], {}, "two tensors are named 'a'"),
        ([parameter("a", 2, slots=("", "m")), parameter("a/m", 3)], {}, "two tensors are named 'a/m'"),
        ([("a", "parameter", (TensorSpec("", "F32", (2,)), TensorSpec("m", "F32", (3,))))], {}, "has 3 rows"),
        ([("a", "parameter", (TensorSpec("m", "F32", (2,)),))], {}, "values do not come before its slots"),
        ([("a", "parameter", ())], {}, "values do not come before its slots"),
        ([("a", "weight", (TensorSpec("", "F32", (2,)),))], {}, "neither parameter nor buffer"),
        ([("a", "parameter", (TensorSpec("", "F4", (2,)),))], {}, "unknown dtype 'F4'"),
        ([parameter("", 2)], {}, "cannot be a tensor's name"),
        ([parameter("scarctl/pad", 2)], {}, "cannot be a tensor's name"),
        ([parameter("__metadata__", 2)], {}, "cannot be a tensor's name"),
        ([parameter("a\nb", 2)], {}, "cannot be a tensor's name"),
        ([parameter("\ud800", 2)], {}, "cannot be a tensor's name"),
        ([parameter("a", 2)], {"partition_bytes": 0}, "'partition_bytes' is 0"),
        ([parameter("a", 2)], {"rows": {"a": -1}}, "'a' is -1"),
        ([parameter("a", 1 << 29)], {"rows": {"a": 1}}, "partitions exceed the limit"),
        ([parameter("a", 1 << 59)], {}, "bytes exceeds the limit"),
    ],
)
def test_unsound_states(state: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_layout(state, **arguments)
