"""Map torch's dtypes to the safetensors names in layouts and files, and torch tensors to raw ones."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, deque
from collections.abc import Callable

import numpy as np
import torch

from scarctl.errors import UsageError
from scarctl.state.layout import DTYPES
from scarctl.state.raw_tensor import RawTensor

_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}

# Older torch releases lack some dtypes, which then cannot occur in a model either.
NAME_TO_TORCH: dict[str, torch.dtype] = {
    name: getattr(torch, attribute)
    for name, attribute in _NAMES.items()
    if name in DTYPES and hasattr(torch, attribute)
}
TORCH_TO_NAME: dict[torch.dtype, str] = {dtype: name for name, dtype in NAME_TO_TORCH.items()}


def name_of(dtype: torch.dtype, tensor: str) -> str:
    """Return the safetensors name of `dtype`. Raises UsageError naming the tensor when the format lacks the dtype."""
    try:
        return TORCH_TO_NAME[dtype]
    except KeyError:
        raise UsageError(
            f"tensor {tensor!r} has dtype {dtype}, which safetensors files cannot hold",
            hint="convert the tensor, or exclude it from the checkpointed state",
        ) from None


def torch_of(name: str) -> torch.dtype:
    """Return the torch dtype of a safetensors name. Raises UsageError when this torch release lacks it."""
    try:
        return NAME_TO_TORCH[name]
    except KeyError:
        raise UsageError(
            f"torch {torch.__version__} has no dtype for {name}", hint="use a newer torch"
        ) from None


_QUICK = (torch.float32, torch.uint8, torch.int64)
"""Dtypes of step counts and of random generators, which each checkpoint saves: numpy has them, in a few calls."""


def to_raw(tensor: torch.Tensor) -> RawTensor:
    """Return a private host copy of `tensor` for an extras structure."""
    name, shape = name_of(tensor.dtype, "extras"), tuple(tensor.shape)
    if tensor.dtype in _QUICK and tensor.device.type == "cpu" and tensor.is_contiguous():
        return RawTensor(name, shape, tensor.detach().numpy().tobytes())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return RawTensor(name, shape, flat.view(torch.uint8).numpy().tobytes(), order_of(tensor))


def order_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the tensor's dimensions ordered by stride, the largest first; () for C order."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return ()
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))
    return () if order == tuple(range(tensor.dim())) else order


def in_order(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of the same values whose dimensions lie in memory in this order (see `order_of`)."""
    if order_of(tensor) == order:
        return tensor
    physical = order or tuple(range(tensor.dim()))
    moved = torch.empty_permuted(tensor.shape, physical, dtype=tensor.dtype, device=tensor.device)
    return moved.copy_(tensor)


def from_raw(raw: RawTensor) -> torch.Tensor:
    """Return the tensor of an extras structure, on the CPU."""
    if not len(raw.data):
        return torch.empty(raw.shape, dtype=torch_of(raw.dtype))
    flat = torch.frombuffer(bytearray(raw.data), dtype=torch_of(raw.dtype))
    return in_order(flat.view(raw.shape), raw.order)


class Deferred:
    """A private value in a form that is quick to make, until it is saved."""

    __slots__ = ()

    def value(self) -> object:
        """Convert the value into its usual form."""
        raise NotImplementedError


_AS_THEY_ARE = frozenset((int, float, bool, str, bytes, type(None)))
_CHANGED_IN_PLACE = (np.ndarray, set, Counter)


def plain(value: object) -> object:
    """Return `value` with every torch tensor inside dicts, lists, tuples and deques replaced by a `RawTensor`.

    Subclasses of tuple, such as torch.Size, become plain tuples. A `Deferred` value gets its usual form.
    """
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, torch.Tensor):
        return to_raw(value)
    if isinstance(value, Deferred):
        return plain(value.value())
    return _rebuild(value, plain)


def private(value: object) -> object:
    """Return the result of `plain`, except that `Deferred` values stay: `plain` of the result is `plain` of `value`
    now.
    """
    if type(value) is dict:
        kept = {}  # a loop, because a step's extras are one small dict: each call that is saved counts
        for key, item in value.items():
            kept[key] = item if isinstance(item, Deferred) else private(item)
        return kept
    if type(value) in _AS_THEY_ARE or isinstance(value, Deferred):
        return value
    if isinstance(value, torch.Tensor):
        return to_raw(value)
    if isinstance(value, _CHANGED_IN_PLACE):
        return copy.copy(value)
    return _rebuild(value, private)


def opened(value: object) -> object:
    """Return `value` with every `Deferred` inside replaced by its usual form. Tensors stay the same objects."""
    return opened(value.value()) if isinstance(value, Deferred) else _rebuild(value, opened)


def torched(value: object) -> object:
    """Return `value` with every `RawTensor` inside dicts, lists and tuples replaced by a torch tensor."""
    if isinstance(value, RawTensor):
        return from_raw(value)
    return _rebuild(value, torched)


def _rebuild(value: object, convert: Callable[[object], object]) -> object:
    if type(value) is dict:
        return {key: convert(item) for key, item in value.items()}
    if type(value) is OrderedDict:
        return OrderedDict((key, convert(item)) for key, item in value.items())
    if isinstance(value, list):
        return [convert(item) for item in value]
    if type(value) is deque:
        return deque((convert(item) for item in value), value.maxlen)
    if isinstance(value, tuple):
        return tuple(convert(item) for item in value)
    return value
