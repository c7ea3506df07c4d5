"""Read the size of a zip archive's directory before parsing it, because each entry becomes a much larger object."""

from __future__ import annotations

import os
from typing import BinaryIO

MAX_DIRECTORY = 16 << 20
"""Bytes; 100,000 tensors need about 10 MB."""

_END, _END64, _LOCATOR = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_LONGEST_COMMENT = 1 << 16
_END_BYTES, _LOCATOR_BYTES, _END64_BYTES = 22, 20, 56


def directory_bytes(file: BinaryIO) -> int:
    """Return the bytes that a zip archive claims for its directory; 0 without an end record, which opening needs."""
    size = file.seek(0, os.SEEK_END)
    start = max(0, size - _END_BYTES - _LONGEST_COMMENT - _LOCATOR_BYTES)
    file.seek(start)
    last = file.read()
    at = last.rfind(_END)
    if at < 0 or len(last) - at < _END_BYTES:
        return 0
    length = int.from_bytes(last[at + 12 : at + 16], "little")
    locator = last[max(0, at - _LOCATOR_BYTES) : at]
    if locator[:4] == _LOCATOR:
        # Readers differ: some follow the locator, others take the record right before it.
        for place in (int.from_bytes(locator[8:16], "little"), start + at - _LOCATOR_BYTES - _END64_BYTES):
            if 0 <= place < size:
                file.seek(place)
                end = file.read(_END64_BYTES)
                if end[:4] == _END64:
                    length = max(length if length < 0xFFFFFFFF else 0, int.from_bytes(end[40:48], "little"))
    return length
