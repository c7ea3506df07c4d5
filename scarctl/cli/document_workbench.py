"""Type the JSON documents of commands on any checkpoint: see `scarctl.cli.documents`."""

from __future__ import annotations

from typing import TypedDict


class Compared(TypedDict):
    """One of two checkpoints."""

    checkpoint: str
    format: str
    tensors: int


class TensorType(TypedDict):
    """Element type and shape of a tensor."""

    dtype: str
    shape: list[int]


class TensorDifference(TypedDict):
    """A tensor that differs. Numbers are None if it is not in both, or not of one type and shape."""

    name: str
    difference: str
    a: TensorType | None
    b: TensorType | None
    changed_values: int | None
    relative: float | None
    norm: float | None
    norm_of_change: float | None
    max_abs: float | None
    nan_appeared: int | None
    inf_appeared: int | None


class Diff(TypedDict):
    """`scarctl diff A B`."""

    a: Compared
    b: Compared
    equal: bool
    tensors: int
    ignored: int
    bytes: int
    different: int
    only_in_a: int
    only_in_b: int
    shape: int
    dtype: int
    values: int
    nan_appeared: int
    inf_appeared: int
    differences: list[TensorDifference]


class TensorCount(TypedDict):
    """Tensors of one element type."""

    tensors: int
    bytes: int


class _Tensor(TensorType):
    name: str
    bytes: int


class Tensor(_Tensor, total=False):
    """One tensor of a checkpoint; the values with `--values`."""

    nan: int
    inf: int
    norm: float | None
    min: float | None
    max: float | None


class InspectedCheckpoint(TypedDict):
    """`scarctl inspect CHECKPOINT`."""

    checkpoint: str
    format: str
    count: int
    values: int
    bytes: int
    dtypes: dict[str, TensorCount]
    tensors: list[Tensor]
    omitted: int
