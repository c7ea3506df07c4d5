"""Compare two checkpoints tensor by tensor, in blocks: which tensors differ, and by how much.

Blocks with the same bytes are not interpreted. So comparing equal checkpoints takes little more than reading them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scarctl.formats.source import BLOCK, Source, blocks
from scarctl.ops.measure import count_not_finite, is_float, join_norms, norm_of, numbers_of
from scarctl.state.group import DTYPES
from scarctl.state.layout import TensorSpec
from scarctl.util.arrays import Bytes

ONLY_A, ONLY_B, SHAPE, DTYPE, VALUES = "only in A", "only in B", "shape", "dtype", "values"
"""Kinds of differences."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Values differ if |b - a| > atol + rtol |a|. With zeros they differ if their bytes do."""

    rtol: float = 0.0
    atol: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether bytes are compared."""
        return not self.rtol and not self.atol


@dataclass(slots=True)
class Difference:
    """A tensor that differs. The numbers are over values that are finite in A and in B."""

    name: str
    kind: str
    """One of the constants of this module. `DTYPE` may come with changed values."""
    a: TensorSpec | None
    b: TensorSpec | None
    measured: bool = False
    """Whether the values were compared. Otherwise the numbers below are meaningless."""
    changed: int = 0
    """Number of values that differ."""
    change: float = 0.0
    """Norm of (b - a)."""
    norm: float = 0.0
    """Norm of a."""
    max_abs: float = 0.0
    """Largest |b - a|."""
    nan: int = 0
    """Values that are NaN in B and not in A."""
    inf: int = 0
    """Values that are infinite in B and not in A."""

    @property
    def relative(self) -> float:
        """Norm of the change relative to the norm of A: infinite if A is zero and B is not."""
        if self.norm:
            return self.change / self.norm
        return math.inf if self.change else 0.0

    @property
    def order(self) -> tuple[Any, ...]:
        """Sort key: values that stopped being finite, then tensors that cannot be compared, then the largest change."""
        first = 0 if self.nan or self.inf else 2 if self.measured else 1
        return first, -(self.nan + self.inf), -self.relative, -self.max_abs, self.name

    def to_json(self) -> dict[str, Any]:
        """Return the fields of a document. Numbers that are unknown or too large for JSON are None."""
        fields: dict[str, Any] = {"name": self.name, "difference": self.kind}
        for side, spec in (("a", self.a), ("b", self.b)):
            fields[side] = None if spec is None else {"dtype": spec.dtype, "shape": list(spec.shape)}
        known = self.measured
        return {
            **fields,
            "changed_values": self.changed if known else None,
            "relative": _json(self.relative) if known else None,
            "norm": _json(self.norm) if known else None,
            "norm_of_change": _json(self.change) if known else None,
            "max_abs": _json(self.max_abs) if known else None,
            "nan_appeared": self.nan if known else None,
            "inf_appeared": self.inf if known else None,
        }


@dataclass(slots=True)
class Comparison:
    """The result of comparing two checkpoints."""

    tensors: int = 0
    """Tensors in A or B, without the ignored ones."""
    ignored: int = 0
    bytes: int = 0
    """Bytes of A that were compared."""
    differences: list[Difference] = field(default_factory=list)
    """Differences, largest first."""

    @property
    def equal(self) -> bool:
        return not self.differences

    def count(self, kind: str) -> int:
        """Return the number of differences of a kind."""
        return sum(one.kind == kind for one in self.differences)

    def to_json(self) -> dict[str, Any]:
        """Return the fields of a document, without the differences."""
        kinds = {
            kind.replace(" ", "_").lower(): self.count(kind)
            for kind in (ONLY_A, ONLY_B, SHAPE, DTYPE, VALUES)
        }
        return {
            "equal": self.equal,
            "tensors": self.tensors,
            "ignored": self.ignored,
            "bytes": self.bytes,
            "different": len(self.differences),
            **kinds,
            "nan_appeared": sum(one.nan for one in self.differences),
            "inf_appeared": sum(one.inf for one in self.differences),
        }


def compare(
    a: Source,
    b: Source,
    *,
    ignore: Sequence[str] = (),
    tolerance: Tolerance | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Comparison:
    """Compare two checkpoints. Names are compared as they are.

    ignore: patterns of names (`fnmatch`) that are left out. progress: called with bytes done and in total.

    Raises Corruption, NoIntactCopy, AccessDenied, Unavailable.
    """
    tolerance = tolerance or Tolerance()
    names = sorted(a.specs.keys() | b.specs.keys())
    kept = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in ignore)]
    found = Comparison(len(kept), len(names) - len(kept))
    total = sum(a.specs[name].nbytes for name in kept if name in a.specs and name in b.specs)
    for name in kept:
        one = _of_tensor(name, a, b, tolerance)
        if one.kind != VALUES or one.changed:
            found.differences.append(one)
        if one.measured:
            found.bytes += one.a.nbytes if one.a is not None else 0
            if progress is not None:
                progress(found.bytes, total)
    found.differences.sort(key=lambda one: one.order)
    return found


def _of_tensor(name: str, a: Source, b: Source, tolerance: Tolerance) -> Difference:
    of_a, of_b = a.specs.get(name), b.specs.get(name)
    if of_a is None or of_b is None:
        return Difference(name, ONLY_B if of_a is None else ONLY_A, of_a, of_b)
    if of_a.shape != of_b.shape:
        return Difference(name, SHAPE, of_a, of_b)
    kind = VALUES if of_a.dtype == of_b.dtype else DTYPE
    found = Difference(name, kind, of_a, of_b)
    if kind == DTYPE and "C64" in (of_a.dtype, of_b.dtype):
        return found  # a complex value is two numbers
    found.measured = True
    same: list[tuple[int, int]] = []
    size_a, size_b = DTYPES[of_a.dtype], DTYPES[of_b.dtype]
    for start, stop in blocks(of_a, BLOCK):
        left = a.read(name, start * size_a, stop * size_a)
        right = b.read(name, start * size_b, stop * size_b)
        if kind == VALUES and np.array_equal(*_words(left, right)):
            same.append((start, stop))
        else:
            _measure(found, left, right, tolerance)
    if found.changed or kind == DTYPE:
        for start, stop in same:  # A's norm is over all values
            values = numbers_of(a.read(name, start * size_a, stop * size_a), of_a.dtype)
            found.norm = join_norms(found.norm, norm_of(values[np.isfinite(values)]))
    return found


def _words(left: Bytes, right: Bytes) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return bytes as wider integers, which are compared faster, when they are aligned."""
    if left.size % 8 or left.ctypes.data % 8 or right.ctypes.data % 8:
        return left, right
    return left.view(np.uint64), right.view(np.uint64)


def _measure(found: Difference, left: Bytes, right: Bytes, tolerance: Tolerance) -> None:
    """Add a block of values to a difference."""
    assert found.a is not None
    assert found.b is not None
    before, after = numbers_of(left, found.a.dtype), numbers_of(right, found.b.dtype)
    with np.errstate(all="ignore"):
        change = after - before
        differ: NDArray[np.bool_]
        if tolerance.exact and found.kind == VALUES:
            item = DTYPES[found.a.dtype]
            differ = (left.reshape(-1, item) != right.reshape(-1, item)).any(axis=1)
        else:
            # Also true where one is not a number; equal infinities and two NaN are taken out below.
            differ = ~(np.abs(change) <= tolerance.atol + tolerance.rtol * np.abs(before))
        if is_float(found.a.dtype) or is_float(found.b.dtype):
            finite = np.isfinite(before) & np.isfinite(after)
            if not finite.all():
                nan, inf = count_not_finite(after, except_in=before)
                found.nan += nan
                found.inf += inf
                alike = (np.isnan(before) & np.isnan(after)) | (~finite & (before == after))
                if not (tolerance.exact and found.kind == VALUES):
                    # Otherwise an infinite tolerance would accept a value that is infinite on one side only.
                    differ = (differ | ~finite) & ~alike
                change, before = change[finite], before[finite]
    # A complex value is two numbers.
    found.changed += int(np.count_nonzero(differ))
    found.change = join_norms(found.change, norm_of(change))
    found.norm = join_norms(found.norm, norm_of(before))
    if change.size:
        found.max_abs = max(found.max_abs, float(np.abs(change).max()))


def _json(number: float) -> float | None:
    return number if math.isfinite(number) else None
