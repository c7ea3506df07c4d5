"""Choose a part of a store's data, so that a check can be spread over several runs."""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import dataclass

from scarctl.errors import UsageError

PIECE = 1 << 20
"""Approximate number of bytes that are chosen or skipped together."""

_PART = re.compile(r"(\d{1,9})/(\d{1,9})", re.ASCII)
_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)%", re.ASCII)


@dataclass(frozen=True, slots=True)
class Subset:
    """A subset of the pieces of segments: those whose hash is in a range."""

    salt: str
    low: float
    high: float

    @staticmethod
    def parse(text: str) -> Subset:
        """Parse a subset. Raises UsageError.

        `2/7` is the second of seven parts, which are always the same and together cover all data. `5%` is a new random
        sample every time.
        """
        if match := _PART.fullmatch(text):
            part, parts = int(match[1]), int(match[2])
            if 1 <= part <= parts:
                return Subset("", (part - 1) / parts, part / parts)
        elif (match := _SHARE.fullmatch(text)) and 0 < float(match[1]) <= 100:
            return Subset(os.urandom(8).hex(), 0.0, float(match[1]) / 100)
        raise UsageError(
            f"{text!r} is not a part of the data",
            hint="use 2/7 (the second of seven parts) or 5% (a random sample)",
        )

    def takes(self, segment: str, piece: int) -> bool:
        """Return whether a piece of a segment, by its index there, is in the subset."""
        hashed = zlib.crc32(f"{self.salt}/{segment}/{piece}".encode()) / (1 << 32)
        return self.low <= hashed < self.high
