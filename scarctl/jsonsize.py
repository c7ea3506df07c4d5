"""How much a JSON text makes of itself, counted before it is parsed: a byte or two can become a list or a dict.

Honest texts of the same length make far less. So the counts are bounded, and not the length alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MAX_CONTAINERS = 1 << 20
"""Lists and objects in one text: a layout of 100,000 parameters with two slots each has 800,000."""
MAX_VALUES = 1 << 23
"""Values in one text, those in containers included: a list of numbers that fills 64 MiB has less."""

_PIECE = 1 << 18


def too_much(text: bytes | str, *, containers: int = MAX_CONTAINERS, values: int = MAX_VALUES) -> str | None:
    """Why a JSON text is not to be parsed, None if it may be. What stands in its strings does not count."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if data.count(b"[") + data.count(b"{") <= containers and data.count(b",") <= values:
        return None
    opened = separated = 0
    inside, escaped = np.uint8(0), False
    for start in range(0, len(data), _PIECE):
        piece = np.frombuffer(data, np.uint8, min(_PIECE, len(data) - start), start)
        quotes, escaped = _quotes(piece, escaped)
        within = np.bitwise_xor.accumulate(quotes) ^ inside
        inside = within[-1]
        outside = within == 0
        opened += int(np.count_nonzero(((piece == ord("[")) | (piece == ord("{"))) & outside))
        separated += int(np.count_nonzero((piece == ord(",")) & outside))
        if opened > containers:
            return f"it has more than {containers} lists and objects"
        if separated > values:
            return f"it has more than {values} values"
    return None


def _quotes(piece: NDArray[np.uint8], escaped: bool) -> tuple[NDArray[np.uint8], bool]:
    """1 where a string begins or ends; whether the first byte of the next piece is escaped.

    Escapes are few in honest texts, and one after the other decides which of several backslashes escapes.
    """
    quotes: NDArray[np.uint8] = (piece == ord('"')).view(np.uint8)
    slashes = np.flatnonzero(piece == ord("\\"))
    if escaped:
        quotes[0] = 0
    if not len(slashes):
        return quotes, False
    # A run of backslashes escapes what follows it if the run is odd; a run at the start may begin escaped.
    first = np.flatnonzero(np.diff(slashes, prepend=-2) != 1)
    starts, lengths = slashes[first], np.diff(np.append(first, len(slashes)))
    if escaped and starts[0] == 0:
        lengths[0] -= 1
    after = (slashes[np.append(first[1:], len(slashes)) - 1] + 1)[lengths % 2 == 1]
    quotes[after[after < len(piece)]] = 0
    return quotes, bool(len(after) and after[-1] == len(piece))
