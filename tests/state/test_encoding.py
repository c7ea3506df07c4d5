"""Test the codec of copies: bounds that hold for every value, and what it leaves exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from scarctl.errors import UsageError
from scarctl.state.encoding import decode, encode, parts, stored_as
from scarctl.state.encodings import ENCODINGS, ERROR_BOUND, Encoding
from scarctl.state.layout import Group, TensorSpec, build_layout
from scarctl.util.arrays import Bytes

WIDTH = 16
LOSSY: list[Encoding] = ["bfloat16", "int8"]
f32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
rows_of_f32 = arrays(np.float32, st.tuples(st.integers(1, 5), st.just(WIDTH)), elements=f32)


def group(rows: int, dtype: str = "F32", slot: str | None = None, width: int = WIDTH) -> Group:
    """Return a group of a parameter, and perhaps a slot of the same shape."""
    tensors = [TensorSpec("", dtype, (rows, width))]
    tensors += [TensorSpec(slot, dtype, (rows, width))] if slot else []
    return Group("w", "parameter", 1, tuple(tensors))


def through(of: Group, encoding: Encoding, data: list[Bytes]) -> list[Bytes]:
    """Return the bytes of all tensors, encoded and decoded again."""
    stored = [encode(data[part.of], of.tensors[part.of], part) for part in parts(of, encoding)]
    layout = stored_as(build_layout([(of.name, of.kind, of.tensors)]), encoding)
    sizes = [spec.nbytes for spec in layout.groups[0].tensors]
    assert [one.size for one in stored] == sizes
    return decode(of, encoding, stored)


def floats(values: np.ndarray, encoding: Encoding, slot: str | None = None) -> np.ndarray:
    """Return float32 rows, encoded and decoded again, as a parameter or as a slot."""
    of = group(len(values), slot=slot)
    data = values.reshape(-1).view(np.uint8)
    return through(of, encoding, [data] * len(of.tensors))[-1].view(np.float32).reshape(values.shape)


@given(rows_of_f32)
def test_bfloat16_is_torchs_and_within_its_bound(values: np.ndarray) -> None:
    back = floats(values, "bfloat16")
    assert np.isfinite(back).all()
    theirs = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    finite = np.isfinite(theirs)
    assert np.array_equal(back[finite], theirs[finite])
    # Subnormal values have fewer bits: half a step of theirs is 2**-134.
    bound = ERROR_BOUND["bfloat16"] * np.abs(values.astype(np.float64)) + 2.0**-134
    assert (np.abs(back.astype(np.float64) - values) <= bound).all()


@given(rows_of_f32)
def test_int8_is_within_its_bound_of_the_largest_value_of_the_row(values: np.ndarray) -> None:
    back = floats(values, "int8").astype(np.float64)
    largest = np.abs(values.astype(np.float64)).max(1, keepdims=True)
    # The scale is rounded to float32: by a part of 2**-24, or by half a subnormal step, 127 times.
    bound = ERROR_BOUND["int8"] * largest * (1 + 1e-4) + 127 * 2.0**-149
    assert (np.abs(back - values) <= bound).all()


@given(arrays(np.float32, (3, WIDTH), elements=st.floats(0, 2.0**100, width=32)))
def test_a_second_moment_never_comes_back_smaller(values: np.ndarray) -> None:
    back = floats(values, "int8", slot="exp_avg_sq").astype(np.float64)
    live = values.astype(np.float64)
    assert (back >= live * (1 - 1e-6) - 2.0**-140).all()
    largest = np.sqrt(live.max(1, keepdims=True))
    assert (np.sqrt(back) - np.sqrt(live) <= largest / 255 * (1 + 1e-4) + 2.0**-70).all()
    assert (back[live == 0] == 0).all()


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_int8_decodes_into_the_live_dtype(dtype: str) -> None:
    torch_dtype = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}[dtype]
    largest = {"F16": 65504.0}.get(dtype, 1e30)
    live = (torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1)) / 8).to(torch_dtype)
    live[0, 0], live[1] = largest, 0
    of = group(6, dtype)
    raw = live.contiguous().view(torch.uint8).numpy().reshape(-1)
    [back] = through(of, "int8", [raw])
    found = torch.from_numpy(back.copy()).view(torch_dtype).reshape(6, WIDTH)
    assert torch.isfinite(found).all()
    assert (found[1] == 0).all()
    error = (found.double() - live.double()).abs()
    # A value in the middle is rounded to the live dtype as well.
    rounding = {"F16": 2.0**-11, "BF16": 2.0**-8, "F32": 2.0**-24}[dtype]
    largest_of_row = live.double().abs().amax(1, keepdim=True)
    assert (error <= (ERROR_BOUND["int8"] + rounding) * largest_of_row * 1.001).all()


@pytest.mark.parametrize("encoding", LOSSY)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so_and_touches_no_other_row(encoding: Encoding, bad: float) -> None:
    values = np.full((3, WIDTH), 0.5, np.float32)
    values[1, 3] = bad
    for slot in (None, "exp_avg_sq"):
        back = floats(values, encoding, slot)
        assert not np.isfinite(back[1, 3])
        assert np.allclose(back[[0, 2]], 0.5, rtol=0.01)
        if encoding == "bfloat16":
            assert np.array_equal(back[1], values[1], equal_nan=True)
        else:
            assert np.isnan(back[1]).all()


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001])
def test_every_nan_stays_a_nan(bits: int) -> None:
    values = np.full((1, WIDTH), bits, np.uint32).view(np.float32)
    assert np.isnan(floats(values, "bfloat16")).all()
    assert np.isnan(floats(values, "int8")).all()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(
    ("kind", "dtype", "shape"),
    [
        ("parameter", "F64", (4, WIDTH)),
        ("parameter", "I64", (4, WIDTH)),
        ("parameter", "BOOL", (4, WIDTH)),
        ("parameter", "F8_E5M2", (4, WIDTH)),
        ("buffer", "F32", (4, WIDTH)),
        ("parameter", "F32", (4, 0)),
    ],
)
def test_all_else_stays_exact(encoding: Encoding, kind: str, dtype: str, shape: tuple[int, ...]) -> None:
    layout = build_layout([("w", kind, (TensorSpec("", dtype, shape),))])
    assert stored_as(layout, encoding) == layout
    of = layout.groups[0]
    data = np.random.default_rng(0).integers(0, 256, of.tensors[0].nbytes, dtype=np.uint8)
    assert np.array_equal(through(of, encoding, [data])[0], data)


@pytest.mark.parametrize("shape", [(), (9,), (9, 2)])
def test_short_rows_have_no_scale(shape: tuple[int, ...]) -> None:
    layout = build_layout([("w", "parameter", (TensorSpec("", "F32", shape),))])
    assert stored_as(layout, "int8") == layout
    assert stored_as(layout, "bfloat16").nbytes * 2 == layout.nbytes


@pytest.mark.parametrize("encoding", LOSSY)
def test_the_partitions_are_the_same(encoding: Encoding) -> None:
    of = group(10, slot="exp_avg")
    layout = build_layout([(of.name, of.kind, of.tensors)], rows={"w": 3})
    stored = stored_as(layout, encoding)
    assert np.array_equal(stored.base, layout.base)
    assert stored.partition_bytes.tolist() != layout.partition_bytes.tolist()
    assert stored.nbytes == {"bfloat16": layout.nbytes // 2, "int8": 10 * 2 * (WIDTH + 4)}[encoding]


def test_a_tensor_with_the_name_of_a_scale_is_refused() -> None:
    specs = (TensorSpec("", "F32", (4, WIDTH)), TensorSpec("scarctl-scale", "F32", (4,)))
    layout = build_layout([("w", "parameter", specs)])
    with pytest.raises(UsageError, match="two tensors are named"):
        stored_as(layout, "int8")
