"""Test the encoding of extras: every value comes back, and hostile text is refused."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from scarctl.errors import Corruption, UsageError
from scarctl.state.codec import MAX_DEPTH, decode, encode
from scarctl.state.layout import DTYPES
from scarctl.state.raw_tensor import RawTensor


def same(a: Any, b: Any) -> bool:
    """Return whether two values are equal in type and bits, NaN, negative zero and the order of dicts included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, (set, frozenset)):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    if isinstance(a, float) and not isinstance(a, np.generic):
        return (math.isnan(a) and math.isnan(b)) or struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex) and not isinstance(a, np.generic):
        return same((a.real, a.imag), (b.real, b.imag))
    if isinstance(a, RawTensor):
        return (a.dtype, a.shape, bytes(a.data)) == (b.dtype, b.shape, bytes(b.data))
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype.str == b.dtype.str and a.shape == b.shape and a.tobytes() == b.tobytes()
    return bool(a == b)


def through(obj: object) -> object:
    text, tensors = encode(obj)
    assert text.isascii()
    # A store's treatment of them: text in a header, bytes in a file.
    stored = {name: RawTensor(t.dtype, t.shape, memoryview(bytes(t.data))) for name, t in tensors.items()}
    return decode(json.loads(json.dumps(text)), stored)


numpy_dtypes = (
    hnp.boolean_dtypes()
    | hnp.integer_dtypes(endianness="?")
    | hnp.unsigned_integer_dtypes(endianness="?")
    | hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64))
    | hnp.complex_number_dtypes(endianness="?", sizes=(64, 128))
    | hnp.datetime64_dtypes(endianness="?")
    | hnp.timedelta64_dtypes(endianness="?")
    | hnp.byte_string_dtypes()
    | hnp.unicode_string_dtypes(endianness="?")
)
arrays = hnp.arrays(numpy_dtypes, hnp.array_shapes(min_dims=0, min_side=0, max_side=4))


@st.composite
def raw_tensors(draw: st.DrawFn) -> RawTensor:
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    size = DTYPES[dtype] * math.prod(shape)
    return RawTensor(dtype, shape, draw(st.binary(min_size=size, max_size=size)))


text = st.text(st.characters(exclude_categories=()), max_size=8)  # lone surrogates as well
hashable = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | text
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
leaves = hashable | arrays | arrays.filter(lambda a: a.size > 0).map(lambda a: a.flat[0]) | raw_tensors()
structures = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(text, inner, max_size=4)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.dictionaries(hashable, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(hashable, st.integers(), max_size=4).map(Counter)
        | st.sets(hashable, max_size=4)
    ),
    max_leaves=12,
)


@given(structures)
def test_roundtrip(obj: object) -> None:
    assert same(through(obj), obj)


@pytest.mark.parametrize(
    "obj",
    [
        -0.0,
        5e-324,
        math.nan,
        2**63 - 1,
        2**64,
        pytest.param(-(10**5000), id="more digits than int() reads"),
        "\ud83d\ude00",  # two surrogates that are not one character
        {"1": 0, 1: 1},
        {(1, ("a", None)): b"\0"},
        {"dict": {"tuple": []}, "array": "0"},
        np.array(3.0),
        np.arange(12).reshape(3, 4)[::-1, ::2],
        np.zeros((0, 2**40), np.uint8),
        np.str_("text"),
        np.bytes_(b"b\x01"),
        np.bool_(True),
        np.datetime64("NaT"),
        np.float64(0.1),
        RawTensor("BF16", (), b"\x80\x3f"),
    ],
)
def test_corners(obj: object) -> None:
    assert same(through(obj), obj)


def test_state_of_generators() -> None:
    generator = np.random.default_rng(7)
    state = through(generator.bit_generator.state)
    expected = generator.random(4)
    generator.bit_generator.state = state
    assert (generator.random(4) == expected).all()


def test_plain_values_stay_readable() -> None:
    assert encode({"lr": 0.1, "steps": [1, None, True]})[0] == '{"dict":{"lr":0.1,"steps":[1,null,true]}}'


def test_arrays_are_copied_in_and_out() -> None:
    array = np.arange(3)
    encoded, tensors = encode(array)
    array[0] = 9
    decoded = decode(encoded, tensors)
    assert isinstance(decoded, np.ndarray)
    assert decoded.tolist() == [0, 1, 2]
    decoded[0] = 8
    assert np.array_equal(decode(encoded, tensors), [0, 1, 2])  # type: ignore[arg-type]


def test_raw_tensor_as_numpy() -> None:
    array = RawTensor("I16", (2, 1), np.array([1, -2], "<i2").tobytes()).numpy()
    assert array.tolist() == [[1], [-2]]
    array[0] = 5
    assert RawTensor("F32", (0, 2), b"").numpy().shape == (0, 2)
    for dtype, data in (("BF16", b"1234"), ("F32", b"1234"), ("F4", b"1")):
        with pytest.raises(UsageError):
            RawTensor(dtype, (2,), data).numpy()


# --- what cannot be encoded -----------------------------------------------------------------------------------

Point = namedtuple("Point", "x y")


class Fraction(float):
    pass


@pytest.mark.parametrize(
    ("obj", "message"),
    [
        ({"sched": {"x": defaultdict(list)}}, "extras.sched.x is a defaultdict"),
        ({"a b": [0, (1, object())]}, r"extras\['a b'\]\[1\]\[1\] is a object"),
        ({1: object()}, r"extras\[1\] is a object"),
        ({object(): 1}, "a key of extras is a object"),
        ([Point(1, 2)], r"extras\[0\] is a Point"),
        (Fraction(1), "extras is a Fraction"),
        (np.array([None]), "array of dtype object"),
        (np.zeros(2, "f4,i4"), "array of dtype"),
        (np.zeros(2, np.longdouble), "array of dtype"),
        (np.longdouble(1), "longdouble"),
        (np.ma.masked_array([1]), "MaskedArray"),
        (bytearray(b"x"), "bytearray"),
        (RawTensor("F32", (2,), b"1234"), "4 bytes for F32"),
        (RawTensor("F4", (2,), b"1"), "unknown dtype"),
        (RawTensor("U8", (-1,), b""), "impossible shape"),
    ],
)
def test_unknown_types_name_their_place(obj: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        encode(obj)


def test_a_socket() -> None:
    with socket.socket() as one, pytest.raises(UsageError, match=r"^extras\.sched\.x is a socket"):
        encode({"sched": {"x": one}})


def nested(levels: int) -> list[Any]:
    result: list[Any] = []
    for _ in range(levels - 1):
        result = [result]
    return result


def test_depth_limit() -> None:
    assert same(through(nested(MAX_DEPTH)), nested(MAX_DEPTH))
    deepest = nested(MAX_DEPTH)
    spot = deepest
    while spot:
        spot = spot[0]
    spot += [np.str_("x"), complex(1, math.nan)]  # leaves that are objects in objects
    assert same(through(deepest), deepest)
    loop: list[Any] = []
    loop.append(loop)
    for obj in (nested(MAX_DEPTH + 1), loop):
        with pytest.raises(UsageError, match="more than 64 levels"):
            encode(obj)


# --- hostile input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "NaN",
        "1e999",
        "1" * 5000,
        "[" * 100_000,
        json.dumps(nested(MAX_DEPTH + 10)),
        '{"np.str":' * 300 + '"x"' + "}" * 300,
        "{}",
        '{"a":1}',
        '{"dict":{},"tuple":[]}',
        '{"dict":{"a":1,"a":2}}',
        '{"dict":[]}',
        '{"items":[[1,2,3]]}',
        '{"items":[[1,1],[{"float":"nan"}]]}',
        '{"items":[[1,1],[true,1]]}',
        '{"items":[[[],1]]}',
        '{"items":{}}',
        '{"Counter":[["a",1],["a",2]]}',
        '{"OrderedDict":7}',
        '{"set":[[]]}',
        '{"set":[1,1.0]}',
        '{"tuple":{}}',
        '{"float":"1"}',
        '{"float":[]}',
        '{"int":"9"}',
        '{"int":9}',
        '{"complex":[1,2]}',
        '{"complex":[1.0]}',
        '{"str":"ff"}',
        '{"str":"f"}',
        '{"bytes":"9"}',
        '{"bytes":0}',
        '{"bytes":"f"}',
        '{"tensor":[]}',
        '[{"tensor":"u"},{"tensor":"u"}]',
        '{"array":"b"}',
        '{"array":["u","<f4",[2]]}',
        '{"array":["u","|O",[1]]}',
        '{"array":["u","O8",[1]]}',
        '{"array":["u","<U1",[-1]]}',
        '{"array":["u","<U1",[true]]}',
        '{"array":["u","<U1",{}]}',
        '{"array":["u","<M8[xx]",[1]]}',
        '{"array":["f","<U1",[1]]}',
        '{"array":["u","|S999999999",[1]]}',
        '{"array":["z","|S0",[9223372036854775807,9223372036854775807]]}',
        '{"array":["z","<f4",[4611686018427387904,4611686018427387904,0]]}',
        '{"scalar":["<f4","00"]}',
        '{"scalar":["<f4"]}',
        '{"scalar":["<U1","61000000"]}',
        '{"scalar":["<f4",0]}',
        '{"np.str":5}',
        '{"np.bytes":"x"}',
    ],
    ids=lambda text: f"{text[:40]} {len(text)}",
)
def test_hostile_text(text: str) -> None:
    tensors = {
        "u": RawTensor("U8", (4,), b"abcd"),
        "b": RawTensor("BF16", (1,), b"ab"),
        "f": RawTensor("F32", (1,), b"abcd"),
        "z": RawTensor("U8", (0,), b""),
    }
    used = {name: t for name, t in tensors.items() if f'"{name}"' in text}
    with pytest.raises(Corruption, match="extras"):
        decode(text, used)


@pytest.mark.parametrize(
    "tensor",
    [
        RawTensor("U8", (5,), b"abcd"),
        RawTensor("F4", (4,), b"abcd"),
        RawTensor("U8", (-4,), b"abcd"),
        RawTensor("U8", (2**62, 2**62, 0), b"abcd"),
        RawTensor("U8", (4,), memoryview(b"abcdabcd")[::2]),
    ],
)
def test_hostile_tensor(tensor: RawTensor) -> None:
    for tag in ("bytes", "tensor", "array"):
        with pytest.raises(Corruption, match="tensor '0'"):
            decode(json.dumps({tag: "0"}), {"0": tensor})


def test_tensors_that_nothing_refers_to() -> None:
    with pytest.raises(Corruption, match="no value refers to"):
        decode("[]", {"0": RawTensor("U8", (0,), b"")})


tags = [
    "dict",
    "items",
    "Counter",
    "OrderedDict",
    "tuple",
    "set",
    "frozenset",
    "float",
    "int",
    "complex",
    "str",
]
tags += ["bytes", "tensor", "array", "scalar", "np.str", "np.bytes"]
atoms = st.sampled_from(
    [None, True, 0, -1, 2**70, 1.5, "", "0", "1", "nan", "0x1", "<f4", "|S0", "00", "2", "0000803f"]
)
trees = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(st.sampled_from(tags), inner).map(lambda pair: {pair[0]: pair[1]})
        | st.dictionaries(st.sampled_from(tags), inner, max_size=2)
    ),
    max_leaves=12,
)


@given(trees, arrays, raw_tensors())
def test_any_json_decodes_or_is_corruption(tree: object, array: np.ndarray[Any, Any], raw: RawTensor) -> None:
    _, tensors = encode(array)
    try:
        obj = decode(json.dumps(tree), {**tensors, "1": raw})
    except Corruption:
        return
    assert same(through(obj), obj)


@given(structures, st.data())
def test_damaged_text_decodes_or_is_corruption(obj: object, data: st.DataObject) -> None:
    text, tensors = encode(obj)
    where = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from('"{}[],:0129.-aefxnu'))
    with contextlib.suppress(Corruption):
        decode(text[:where] + other + text[where + 1 :], tensors)
