"""Name the encodings of copies, and bound their errors. Imports nothing, so that commands start fast."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

Encoding: TypeAlias = Literal["exact", "bfloat16", "int8"]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)

ERROR_BOUND: dict[Encoding, float] = {"exact": 0.0, "bfloat16": 2.0**-8, "int8": 1 / 254}
"""Largest error of a parameter's value, relative to the value ("bfloat16") or to the largest value of its row ("int8").
Roots of slots in "int8" have twice that error."""
