"""Count the values of a JSON text before it is parsed, because two bytes can become a list or dict in memory.

Honest texts contain far fewer values for their length. So the counts are bounded, not only the length.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MAX_CONTAINERS = 1 << 20
"""Lists and objects in one text: a layout of 100,000 parameters with two slots each has 800,000."""
MAX_VALUES = 1 << 23
"""Values in one text, nested ones included: a list of numbers that fills 64 MiB has fewer."""

_PIECE = 1 << 18


def too_much(text: bytes | str, *, containers: int = MAX_CONTAINERS, values: int = MAX_VALUES) -> str | None:
    """Return why a JSON text must not be parsed, or None if it may be. Characters within strings do not count."""
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
    """Return 1 where a string begins or ends, and whether the first byte of the next piece is escaped.

    Of several backslashes in a row, every second one is escaped itself. Honest texts have few escapes.
    """
    quotes: NDArray[np.uint8] = (piece == ord('"')).view(np.uint8)
    slashes = np.flatnonzero(piece == ord("\\"))
    if escaped:
        quotes[0] = 0
    if not len(slashes):
        return quotes, False
    # A run of backslashes escapes the next byte if its length is odd. A run at the start may begin escaped.
    first = np.flatnonzero(np.diff(slashes, prepend=-2) != 1)
    starts, lengths = slashes[first], np.diff(np.append(first, len(slashes)))
    if escaped and starts[0] == 0:
        lengths[0] -= 1
    after = (slashes[np.append(first[1:], len(slashes)) - 1] + 1)[lengths % 2 == 1]
    quotes[after[after < len(piece)]] = 0
    return quotes, bool(len(after) and after[-1] == len(piece))
