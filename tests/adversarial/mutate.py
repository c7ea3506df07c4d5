"""Mutate JSON values by structure, and files by their bytes."""

from __future__ import annotations

import json
import random
from typing import Any

HOSTILE_TEXTS = (
    "", "\0", "\n", "\x1b[2J\x1b]0;owned\x07", "\x9b31m", "\u202eabc", "\ud800", "..", "../../../etc/passwd",
    "/etc/passwd", "a/b", ".tmp-x", "\u0663", "１", "é" * 50, "9" * 400, "1_0", " 1", "+1", "-1", "0x10", "1e5", "NaN",
    "x" * 5000, "scarctl/", "scarctl/partitions", "__metadata__", "F32", "F64", "U8", "C64", "BF16", "commit", "epoch",
    "compact", "members", "%s%n{0}", "0" * 32, "0" * 64, "g" * 64, "A" * 64, "00000001-" + "0" * 32 + ".safetensors",
)  # fmt: skip
HOSTILE_NUMBERS = (
    0, 1, -1, 2, 3, 7, 8, 9, 255, 4096, 65535, 1 << 23, 1 << 28, (1 << 31) - 1, 1 << 31, 1 << 32, (1 << 40) - 1,
    1 << 40, 1 << 53, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, 1 << 64, -(1 << 63), -(1 << 64), 10**30,
    10**400, -(10**400), 0.0, -0.0, 0.5, 1.5, 1e308, -1e308, 5e-324,
)  # fmt: skip
# Values that JSON can express and Python's encoder does not write: put in by hand, for a text of this form.
_MARK = "@raw{}@"
RAW = (
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 5000, "-" + "9" * 4301, "[" * 100_000,
    "[" * 900 + "]" * 900,
    '{"a":' * 900 + "1" + "}" * 900, "[" * 300 + "]" * 300, '{"a":1,"a":2}', '{"":0,"":0}', "tru", "1.", "01",
    "'a'", '"\\ud800"',
    '"\\u0000"', '"\t"', "[1,]", "{}[]", "/**/1", "\ufeff1", "1E+400", "-", '"',
)  # fmt: skip


def hostile(rng: random.Random) -> Any:
    """Return a value that no reader expects."""
    kind = rng.randrange(12)
    if kind < 3:
        return rng.choice(HOSTILE_NUMBERS)
    if kind < 6:
        return rng.choice(HOSTILE_TEXTS)
    if kind == 6:
        return _MARK.format(rng.randrange(len(RAW)))
    if kind == 7:
        return rng.choice((None, True, False, [], {}, [[]], [{}], {"": {}}, [None] * 9, {"a": [1]}))
    if kind == 8:
        return [rng.choice(HOSTILE_NUMBERS) for _ in range(rng.randrange(8))]
    if kind == 9:
        return rng.getrandbits(rng.randrange(1, 80)) * rng.choice((1, -1))
    if kind == 10:
        return "".join(chr(rng.randrange(rng.choice((128, 0x3000)))) for _ in range(rng.randrange(12)))
    return [hostile(rng), hostile(rng)] if rng.randrange(2) else {rng.choice(HOSTILE_TEXTS): hostile(rng)}


def mangle(rng: random.Random, value: Any, times: int = 1) -> Any:
    """Return a copy of a JSON value with a few places changed."""
    for _ in range(times):
        value = _mangled(rng, value)
    return value


def _mangled(rng: random.Random, value: Any) -> Any:
    if isinstance(value, dict) and value:
        new = dict(value)
        key = rng.choice(list(new))
        what = rng.randrange(14)
        if what == 0:
            del new[key]
        elif what == 1:
            new[rng.choice(HOSTILE_TEXTS)] = new.pop(key)
        elif what == 2:
            new[rng.choice(HOSTILE_TEXTS)] = hostile(rng)
        elif what == 3:
            new[key] = new[rng.choice(list(new))]
        else:
            new[key] = _mangled(rng, new[key])
        return new
    if isinstance(value, list) and value:
        items = list(value)
        at, what = rng.randrange(len(items)), rng.randrange(10)
        if what == 0:
            del items[at]
        elif what == 1:
            items.insert(at, items[rng.randrange(len(items))])
        elif what == 2:
            items.append(hostile(rng))
        elif what == 3:
            rng.shuffle(items)
        else:
            items[at] = _mangled(rng, items[at])
        return items
    if type(value) is int and rng.randrange(2):
        return rng.choice(
            (value + 1, value - 1, -value, value * 2, value << 32, value ^ 1 << rng.randrange(63))
        )
    if isinstance(value, str) and value and rng.randrange(3) == 0:
        at = rng.randrange(len(value))
        return value[:at] + rng.choice((*HOSTILE_TEXTS[:12], "", value)) + value[at + rng.randrange(2) :]
    return hostile(rng)


def text(value: Any) -> bytes:
    """Return JSON of a mangled value, with what Python's encoder cannot write, and with halves of characters."""
    data = json.dumps(value, separators=(",", ":"), sort_keys=True)
    return with_raw(data).encode("utf-8", "surrogatepass")


def with_raw(data: str) -> str:
    """Replace marks by what they stand for."""
    if "@raw" in data:
        for k, raw in enumerate(RAW):
            data = data.replace(f'"{_MARK.format(k)}"', raw)
    return data


def has_raw(value: Any) -> bool:
    """Return whether no encoder would write the value: its file can have no valid checksum."""
    return "@raw" in json.dumps(value)


def bytes_of(rng: random.Random, data: bytes) -> bytes:
    """Return the bytes with some of them changed, removed, added or repeated."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(out) + 1)
        what = rng.randrange(8)
        if what <= 2 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif what == 3 and at < len(out):
            out[at] = rng.choice((0, 1, 0x22, 0x5B, 0x7B, 0x7F, 0x80, 0xFF))
        elif what == 4:
            del out[at : at + rng.choice((1, 2, 8, 64, len(out)))]
        elif what == 5:
            out[at:at] = rng.choice(
                (b"\0", b"\xff" * 8, b"[" * 2000, b"9" * 4400, b'"', b"\xed\xa0\x80", b'{"a":')
            )
        elif what == 6:
            length = rng.choice((4, 8, 16, 64))
            source = rng.randrange(len(out) + 1)
            out[at : at + length] = out[source : source + length]
        else:
            size = rng.choice((2, 4, 8))
            number = rng.choice([n for n in HOSTILE_NUMBERS if isinstance(n, int)])
            out[at : at + size] = (number % (1 << 8 * size)).to_bytes(size, "little")
    return bytes(out)
