"""Hold a tensor as its bytes, of any dtype that safetensors has."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl.errors import UsageError
from scarctl.state.layout import DTYPES

NUMPY = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "|i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "|u1",
    "BOOL": "|b1",
    "C64": "<c8",
}
"""numpy's name of each dtype that it has."""


@dataclass(frozen=True)
class RawTensor:
    """A tensor of any safetensors dtype, including those that numpy lacks (BF16, F8). C order, little endian."""

    dtype: str
    """A name in `scarctl.state.group.DTYPES`."""
    shape: tuple[int, ...]
    data: bytes | memoryview
    """nbytes bytes, contiguous."""
    order: tuple[int, ...] = ()
    """Order of the dimensions in the original tensor's memory, outermost first; () means C order."""

    @property
    def nbytes(self) -> int:
        """Bytes that dtype and shape require."""
        return DTYPES[self.dtype] * math.prod(self.shape)

    def numpy(self) -> NDArray[Any]:
        """Return a writable copy. Raises UsageError for a dtype that numpy lacks, and for data of another size."""
        reason = fault_of(self)
        if reason:
            raise UsageError(f"not a tensor: {reason}")
        if self.dtype not in NUMPY:
            raise UsageError(f"numpy has no dtype for {self.dtype}")
        return np.ndarray(self.shape, NUMPY[self.dtype], bytearray(self.data))


def fault_of(tensor: RawTensor) -> str:
    """Return why the tensor is invalid, or ""."""
    if tensor.dtype not in DTYPES:
        return f"unknown dtype {tensor.dtype!r}"
    if len(tensor.shape) > 64 or not all(type(size) is int and 0 <= size < 1 << 63 for size in tensor.shape):
        return "an impossible shape"
    view = memoryview(tensor.data)
    if not view.c_contiguous or view.nbytes != tensor.nbytes:
        return f"{view.nbytes} bytes for {tensor.dtype} of shape {tensor.shape}"
    return ""
