"""Count the objects that a pickle of a checkpoint's metadata would create, before it is unpickled.

One byte can create a list, or index a memo of many gigabytes. Only the opcodes that such metadata need are allowed.
Opcodes that create objects may occur no more often than in honest metadata of the same length.
"""

from __future__ import annotations

import mmap
import re

_PLAIN = rb"N\x88\x89\]})(\x94\x85\x86\x87teasubR\x81\x93\x8f\x90\x9101"
_OPERAND = rb"[Kh\x80].|M..|[Jj].{4}|[G\x95].{8}"
# Bounded, because the matcher needs memory for each repetition.
_RUN = re.compile(rb"(?:[%s]{1,4096}|%s){1,4096}" % (_PLAIN, _OPERAND), re.DOTALL)
_OPERANDS = re.compile(_OPERAND, re.DOTALL)
_LENGTHS = {0x8C: 1, ord("X"): 4, 0x8A: 1, ord("C"): 1, ord("B"): 4}
"""By opcode, the size in bytes of the length field that follows it. The field precedes data of that length."""
_STOP = ord(".")
_PIECE = 1 << 20

_MAKING = (b"]", b"}", b"(", b"\x85", b"\x86", b"\x87", b"\x8f", b"\x91")
_CALLING = (b"R", b"\x81", b"b")
_TORCH_MAKING = (*_MAKING, *_CALLING, b"Q")
_ALLOWANCE = 4096
_PER_BYTE = {"containers": 1 / 8, "texts": 1 / 24, "calls": 1 / 10, "opcodes": 0.6}
"""About twice the counts of honest metadata."""
_MOST = {"containers": 1 << 22, "texts": 1 << 20, "calls": 1 << 22, "opcodes": 1 << 26}
_SLACK, _DENSER = 1 << 16, 1.5
"""A prefix may be denser than the whole by this constant and factor. Denser prefixes are refused early."""

_TORCH_PLAIN = rb"N\x88\x89\]})(\x85\x86\x87teasubR\x81\x8fQ"
_TORCH_OPERAND = rb"[Khq\x80].|M..|[Jjr].{4}|G.{8}|c[^\n]{0,200}\n[^\n]{0,200}\n"
_TORCH_RUN = re.compile(rb"(?:[%s]{1,4096}|%s){1,4096}" % (_TORCH_PLAIN, _TORCH_OPERAND), re.DOTALL)
_TORCH_OPERANDS = re.compile(_TORCH_OPERAND, re.DOTALL)
_TORCH_LENGTHS = {ord("X"): 4, ord("U"): 1, 0x8A: 1}
MOST_OF_TORCH = 1 << 20
MOST_MADE_OF_TORCH = 1 << 18
"""Opcodes in the pickles of a `.pt` file, and how many of them may create objects: for its plain values."""
_OF_TENSOR, _MADE_OF_TENSOR = 64, 24
"""Opcodes and objects that each tensor with data of its own may add: about twice as many as torch writes."""
_MOST_TENSORS = 1 << 17


def torch_fault(data: bytes, tensors: int = 0) -> str | None:
    """Return why the pickle of a `.pt` file must not be read, or None. Plain values are allowed, in limited number.

    tensors: how many of them have data elsewhere in the file.
    """
    return _torch_scan(data, 0, 1, len(data), tensors)[0]


def torch_pickles_fault(data: bytes | mmap.mmap, at: int, count: int, most: int) -> tuple[str | None, int]:
    """Return the fault of `count` consecutive pickles from byte `at`, at most `most` bytes, and the byte at their end.

    A pickle with an opcode that torch refuses is the last: nothing after it would be read.
    """
    return _torch_scan(data, at, count, at + most, 0)


def _torch_scan(
    data: bytes | mmap.mmap, at: int, count: int, stop: int, tensors: int
) -> tuple[str | None, int]:
    backed = min(tensors, _MOST_TENSORS)
    opcodes, made = MOST_OF_TORCH + _OF_TENSOR * backed, MOST_MADE_OF_TORCH + _MADE_OF_TENSOR * backed
    stop, first = min(stop, len(data)), at
    while at < stop and count:
        run = _TORCH_RUN.match(data, at, min(at + _PIECE, len(data)))
        if run is not None:
            bare, found = _TORCH_OPERANDS.subn(b"", run.group())
            opcodes -= len(bare) + found
            made -= sum(map(bare.count, _TORCH_MAKING))
            at = run.end()
        elif (width := _TORCH_LENGTHS.get(data[at])) is not None:
            opcodes -= 1
            at += 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")
        elif data[at] == _STOP:
            at += 1
            count -= 1
        else:
            return None, at  # an opcode that torch refuses
        if opcodes < 0 or made < 0:
            return "its structure has too many parts, lists and dicts for its tensors", at
    return (f"its structure does not end within {stop - first} bytes" if count or at > stop else None), at


def pickle_fault(data: bytes) -> str | None:
    """Return why the pickle of a checkpoint's metadata must not be read, or None if it may be."""
    size = len(data)
    whole = {what: min(_MOST[what], _ALLOWANCE + size * rate) for what, rate in _PER_BYTE.items()}
    found = dict.fromkeys(_PER_BYTE, 0)
    at = look = 0
    while at < size:
        run = _RUN.match(data, at, at + _PIECE)
        if run is not None:
            bare, operands = _OPERANDS.subn(b"", run.group())
            found["opcodes"] += len(bare) + operands
            found["containers"] += sum(map(bare.count, _MAKING))
            found["calls"] += sum(map(bare.count, _CALLING))
            at = run.end()
        elif data[at] == _STOP:
            over = [what for what, count in found.items() if count > whole[what]]
            return f"it has too many {over[0]} for its length" if over else None
        elif (width := _LENGTHS.get(data[at])) is not None:
            found["texts"] += 1
            at += 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")
        else:
            return f"it is cut short or has the opcode {data[at]:#04x}, which no checkpoint's metadata needs"
        for what, count in found.items() if at >= look else ():
            look = at + _SLACK
            if count > whole[what] or count > _SLACK + _DENSER * at * _PER_BYTE[what]:
                return (
                    f"it has {count} {what} in its first {at} bytes, more than a checkpoint's metadata have"
                )
    return "it has no end"
