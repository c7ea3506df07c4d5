"""Test layouts as JSON: reading back, digests, differences, and hostile documents."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scarctl.errors import Corruption
from scarctl.state.layout import MAX_PARTITIONS, Group, Layout, TensorSpec
from tests.state.layouts import group, layouts, model, rows


@given(layouts)
def test_json_roundtrip(layout: Layout) -> None:
    text = json.dumps(layout.to_json())
    twin = Layout.from_json(json.loads(text))
    assert twin == layout
    assert hash(twin) == hash(layout)
    assert twin.groups == layout.groups
    assert twin.optimizer == layout.optimizer
    assert twin.differences(layout) == []
    assert re.fullmatch("[0-9a-f]{64}", layout.digest)


def test_digest_never_changes() -> None:
    # Stores name layouts by it.
    assert model().digest == "5b7ecaac85dc49a50a660ec2f2a204da898140a4789286d5b7e8c69eebe9864d"
    assert Layout([]).digest == "d4af4dad975b151d10f5d8e223bb3552d4239cd0ff1924475a319cff1e943468"


@given(layouts, layouts)
def test_differences_are_empty_just_for_equal_layouts(one: Layout, other: Layout) -> None:
    assert (one.differences(other) == []) == (one == other) == (one.to_json() == other.to_json())


def test_differences() -> None:
    old = model()
    new = Layout(
        [
            group("emb.weight", 12, 4, rows=3),
            group("layers.0.weight", 6, 2, rows=3, slots=("", "exp_avg")),
            Group("layers.0.bias", "buffer", 6, old.groups[2].tensors),
            group("scale", rows=1, dtype="BF16", slots=("", "exp_avg", "exp_avg_sq", "master")),
            group("new", 2),
            Group("mean", "buffer", 6, (TensorSpec("", "F64", (6,)),)),
        ],
        "",
    )
    assert old.differences(new) == [
        "optimizer AdamW -> none",
        "tensor 'emb.weight' resized (10, 4) -> (12, 4)",
        "tensor 'emb.weight/exp_avg' resized (10, 4) -> (12, 4)",
        "tensor 'emb.weight/exp_avg_sq' resized (10, 4) -> (12, 4)",
        "tensor 'layers.0.weight/exp_avg_sq' missing",
        "tensor 'layers.0.weight' rows per partition 2 -> 3",
        "tensor 'layers.0.bias' was a parameter, and is a buffer",
        "tensor 'scale' dtype F32 -> BF16",
        "tensor 'scale/exp_avg' dtype F32 -> BF16",
        "tensor 'scale/exp_avg_sq' dtype F32 -> BF16",
        "tensor 'scale/master' new",
        "tensor 'empty' missing",
        "tensor 'new' new",
    ]
    assert old.differences(Layout(old.groups[::-1], "AdamW")) == ["the tensors are in another order"]
    swapped = Group(
        "a",
        "parameter",
        1,
        (TensorSpec("", "F32", ()), TensorSpec("v", "F32", ()), TensorSpec("m", "F32", ())),
    )
    plain = Group("a", "parameter", 1, (swapped.tensors[0], swapped.tensors[2], swapped.tensors[1]))
    assert Layout([plain]).differences(Layout([swapped])) == ["tensor 'a' has its slots in another order"]


def test_two_kinds_of_nothing() -> None:
    layout = Layout([group("wide", 5, 0, rows=2), group("none", 0, 3)])
    assert (layout.partitions, layout.nbytes) == (0, 0)
    assert layout.partition_bytes.size == layout.group_of([]).size == layout.row_ranges([])[0].size == 0


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


@given(json_values)
def test_foreign_json_is_corruption(obj: object) -> None:
    with pytest.raises(Corruption):
        Layout.from_json(obj)


def _places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else []
    return [path, *(place for key in keys for place in _places(tree[key], (*path, key)))]


@given(json_values, st.data())
def test_a_layout_with_one_foreign_value_is_corruption_or_sound(value: object, data: st.DataObject) -> None:
    tree = model().to_json()
    *path, last = data.draw(st.sampled_from(_places(tree)[1:]))
    spot = tree
    for key in path:
        spot = spot[key]
    spot[last] = copy.deepcopy(value)
    try:
        layout = Layout.from_json(tree)
    except Corruption:
        return
    assert layout.to_json() == tree
    assert layout.partitions <= MAX_PARTITIONS


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("shape", [2**62], "impossible shape"),
        ("shape", [-1], "impossible shape"),
        ("shape", [True], "are not integers"),
        ("shape", [1.0], "are not integers"),
        ("shape", [1] * 65, "impossible shape"),
        ("shape", [8, 2**58], "bytes exceeds the limit"),
        ("shape", [2**40], "partitions exceed the limit"),
        ("dtype", "F128", "unknown dtype"),
        ("slot", "m", "values do not come before its slots"),
        ("slot", None, "slot of a tensor is not of type str"),
    ],
)
def test_hostile_tensor(field: str, value: object, message: str) -> None:
    tree = rows(4).to_json()
    tree["groups"][0]["tensors"][0][field] = value
    with pytest.raises(Corruption, match=message):
        Layout.from_json(tree)


@pytest.mark.parametrize(
    "change", [{"rows_per_partition": 0}, {"rows_per_partition": True}, {"more": 1}, {"name": 3}]
)
def test_hostile_group(change: dict[str, object]) -> None:
    tree = rows(4).to_json()
    tree["groups"][0] |= change
    with pytest.raises(Corruption, match="not a layout"):
        Layout.from_json(tree)
