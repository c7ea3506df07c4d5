"""Choose a part of a store's data, so that a check bit by bit can take days instead of one go."""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import dataclass

from scarctl.errors import UsageError

PIECE = 1 << 20
"""Bytes, about, that are chosen or passed over together."""

_PART = re.compile(r"(\d{1,9})/(\d{1,9})", re.ASCII)
_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)%", re.ASCII)


@dataclass(frozen=True, slots=True)
class Subset:
    """Which pieces of segments: those whose hash is in a range."""

    salt: str
    low: float
    high: float

    @staticmethod
    def parse(text: str) -> Subset:
        """`2/7`: the second of seven parts, which together are everything, the same ones every time. `5%`: so much, new
        at random every time.

        Raises UsageError.
        """
        if match := _PART.fullmatch(text):
            part, parts = int(match[1]), int(match[2])
            if 1 <= part <= parts:
                return Subset("", (part - 1) / parts, part / parts)
        elif (match := _SHARE.fullmatch(text)) and 0 < float(match[1]) <= 100:
            return Subset(os.urandom(8).hex(), 0.0, float(match[1]) / 100)
        raise UsageError(
            f"{text!r} is no part of the data", hint="give 2/7 (the second of seven parts) or 5% (at random)"
        )

    def takes(self, segment: str, piece: int) -> bool:
        """Return whether a piece of a segment, by its number there, is of the part."""
        hashed = zlib.crc32(f"{self.salt}/{segment}/{piece}".encode()) / (1 << 32)
        return self.low <= hashed < self.high
