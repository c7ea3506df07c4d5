"""Test JSON, names and safetensors headers: only canonical forms are written and read."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scarctl.errors import Corruption
from scarctl.store.format import (
    FORMAT,
    check_name,
    dump_json,
    is_segment_name,
    load_json,
    number_of_record,
    shard_of_folder,
)
from scarctl.store.header import MAX_HEADER, parse_header, place_header

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=5),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=4))
def test_json_round_trips(obj: dict[str, object]) -> None:
    obj = {**obj, "format": 1}
    obj.pop("checksum", None)
    found = load_json(dump_json(obj), "file")
    found.pop("checksum")
    assert found == obj


def test_every_flipped_bit_of_a_json_file_is_corruption() -> None:
    good = dump_json({"format": 1, "text": "a\u00e9", "list": [1, None, True]})
    for i in range(len(good) * 8):
        bad = bytearray(good)
        bad[i // 8] ^= 1 << i % 8
        with pytest.raises(Corruption, match=r"file\.json"):
            load_json(bytes(bad), "file.json")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'{"format":1}',
        b'{"a":1,"a":1}',
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":1e999}',
        b"[" * 100_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b'{"a":' + b"9" * 10_000 + b"}",
        b'{"a":"\\ud800"}',
        b'{"format":1} ',
    ],
)
def test_hostile_json_is_corruption(text: bytes) -> None:
    with pytest.raises(Corruption, match=r"file\.json"):
        load_json(text, "file.json")


def test_a_newer_format_is_refused_and_says_so() -> None:
    with pytest.raises(Corruption, match="newer") as info:
        load_json(dump_json({"format": FORMAT + 1}), "file.json")
    assert info.value.kind == "newer-format"
    for value in (0, -1, True, "1", None, 1.5):
        with pytest.raises(Corruption):
            load_json(dump_json({"format": value}), "file.json")


@pytest.mark.parametrize(
    "name", ["", "/", "a/../b", "..", "a//b", "/etc/passwd", "a\0b", "a/.hidden", "a\n", "a" * 200, "é"]
)
def test_names_outside_the_pattern_are_refused(name: str) -> None:
    with pytest.raises(Corruption):
        check_name(name)


def test_names_in_records_are_one_strict_component() -> None:
    good = "00000001-" + "0a" * 16 + ".safetensors"
    assert is_segment_name(good)
    for bad in (good.upper(), "../" + good, good + "\n", good[1:], "\u0660" + good[1:], 3, None):
        assert not is_segment_name(bad)
    assert number_of_record("0" * 19 + "7.json") == 7
    for name in ("\u0660" * 20 + ".json", "0" * 20 + ".json", "9" * 20 + ".json"):
        assert number_of_record(name) is None
    assert [shard_of_folder(x) for x in ("0", "12", "012", "-1", "1e3", "1000000")] == [
        0,
        12,
        None,
        None,
        None,
        None,
    ]


def test_header_is_aligned_and_round_trips() -> None:
    header, raw = place_header(
        [("a/b", "F32", (2, 3)), ("é", "BF16", ()), ("z", "U8", (0, 5))], {"format": "1"}
    )
    assert len(raw) == header.length
    assert len(raw) % 8 == 0
    assert parse_header(raw, len(raw) + 26, "f") == header


def _file(entries: object, size: int) -> tuple[bytes, int]:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + size


HUGE = 2**61


@pytest.mark.parametrize(
    ("entries", "size"),
    [
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, 5),  # data beyond the tensors
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, 8),  # a hole
        (
            {
                "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            },
            4,
        ),
        ({"a": {"dtype": "F32", "shape": [HUGE, HUGE], "data_offsets": [0, 4]}}, 4),
        ({"a": {"dtype": "U8", "shape": [HUGE], "data_offsets": [0, HUGE]}}, 4),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}, 0),
        ({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, 4),
        ({"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, 4),
        ({"a": {"dtype": "F32", "shape": [1] * 65, "data_offsets": [0, 4]}}, 4),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, 4),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, 8),
        ({"a": {"dtype": "Q9", "shape": [1], "data_offsets": [0, 4]}}, 4),
        ({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, 4),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], "x": 1}}, 4),
        ({"a": 3}, 0),
        ({"__metadata__": {"a": 1}}, 0),
        ({"__metadata__": []}, 0),
        ([], 0),
        (b'{"a":' * 30_000, 0),
        (b"{" + b'"a":{},' * 2 + b'"b":{}}', 0),
        (b"\xff", 0),
    ],
)
def test_hostile_headers_are_corruption(entries: object, size: int) -> None:
    raw, total = _file(entries, size)
    with pytest.raises(Corruption, match=r"f\.safetensors"):
        parse_header(raw, total, "f.safetensors")


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, MAX_HEADER + 1, 100])
def test_a_header_length_is_checked_before_anything_is_read(length: int) -> None:
    with pytest.raises(Corruption):
        parse_header(length.to_bytes(8, "little") + b"{}", 10, "f")
