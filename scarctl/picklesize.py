"""What a pickle of a checkpoint's metadata would make, counted before anything is unpickled.

A byte can become a list, or the index of a memo of many gigabytes. Only the opcodes that such metadata have are let
through, and of those that make something no more than honest metadata of the same length have.
"""

from __future__ import annotations

import re

_PLAIN = rb"N\x88\x89\]})(\x94\x85\x86\x87teasubR\x81\x93\x8f\x90\x9101"
_OPERAND = rb"[Kh\x80].|M..|[Jj].{4}|[G\x95].{8}"
# Not more at once: the matcher keeps something for each.
_RUN = re.compile(rb"(?:[%s]{1,4096}|%s){1,4096}" % (_PLAIN, _OPERAND), re.DOTALL)
_OPERANDS = re.compile(_OPERAND, re.DOTALL)
_LENGTHS = {0x8C: 1, ord("X"): 4, 0x8A: 1, ord("C"): 1, ord("B"): 4}
"""Opcodes that are followed by a length, in so many bytes, and by that much text, number or bytes."""
_STOP = ord(".")

_MAKING = (b"]", b"}", b"(", b"\x85", b"\x86", b"\x87", b"\x8f", b"\x91")
_CALLING = (b"R", b"\x81", b"b")
_ALLOWANCE = 4096
_BYTES_PER_TEXT = 24
_BYTES_PER_CONTAINER = 8
_BYTES_PER_CALL = 10
_OPCODES_PER_BYTE = 0.6
MOST = 1 << 22
"""Containers, and calls, however long it is."""
MOST_TEXTS = 1 << 20


def pickle_fault(data: bytes) -> str | None:
    """Why the pickle is not to be read, None if it may be."""
    containers = min(MOST, _ALLOWANCE + len(data) // _BYTES_PER_CONTAINER)
    texts = min(MOST_TEXTS, _ALLOWANCE + len(data) // _BYTES_PER_TEXT)
    calls = min(MOST, _ALLOWANCE + len(data) // _BYTES_PER_CALL)
    opcodes = _ALLOWANCE + int(_OPCODES_PER_BYTE * len(data))
    at = 0
    while at < len(data):
        run = _RUN.match(data, at)
        if run is not None:
            bare, found = _OPERANDS.subn(b"", run.group())
            opcodes -= len(bare) + found
            containers -= sum(map(bare.count, _MAKING))
            calls -= sum(map(bare.count, _CALLING))
            at = run.end()
        elif data[at] == _STOP:
            return None
        elif (width := _LENGTHS.get(data[at])) is not None:
            texts -= 1
            at += 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")
        else:
            return f"it has the opcode {data[at]:#04x}, which no checkpoint's metadata needs, or ends in the middle"
        if min(containers, texts, calls, opcodes) < 0:
            return f"it makes more of its {len(data)} bytes than a checkpoint's metadata do"
    return "it has no end"
