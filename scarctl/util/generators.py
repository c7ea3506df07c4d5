"""Keep the states of the global random generators of Python and numpy, faster than their own functions do.

`random.getstate` builds 625 integers, and `numpy.random.get_state` reads 624 words one by one: 40 µs after every step
of a training. Here the generators' memory is copied, and interpreted when a state is needed. Its layout is
determined on generators made for this purpose. If it yields other values than the official functions, these are used.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy import random as numpy_random

_WORDS = 624
"""Words of a Mersenne twister. Its position is one word more."""
_BYTES = 4 * (_WORDS + 1)
_SIGN = 16
"""First bytes of a state. A generator that has drawn has another position, or other words throughout."""
_Memory: Any = ctypes.c_char * _BYTES
_Gauss: Any = ctypes.c_char * 16


class HostStates:
    """The states of both generators at one moment."""

    __slots__ = ("_numpy", "_python")

    def __init__(self, python: Any, of_numpy: Any) -> None:
        self._python = python
        self._numpy = of_numpy

    def python(self) -> tuple[Any, ...]:
        """Return what `random.getstate` would have returned then."""
        words, gauss = self._python
        if isinstance(words, bytes):
            position, *state = np.frombuffer(words, np.uint32).tolist()
            return 3, (*state, position), gauss
        return gauss  # type: ignore[no-any-return]

    def numpy(self) -> tuple[Any, ...]:
        """Return what `numpy.random.get_state` would have returned then."""
        words, gauss = self._numpy
        if isinstance(words, bytes):
            state = np.frombuffer(words, np.uint32)
            has, value = struct.unpack("=i4xd", gauss)
            return "MT19937", state[:_WORDS].copy(), int(state[_WORDS]), has, value
        return gauss  # type: ignore[no-any-return]

    def same_python(self, other: HostStates) -> bool:
        """Return whether Python's generator was in the same state."""
        return bool(self._python == other._python)

    def same_numpy(self, other: HostStates) -> bool:
        """Return whether numpy's generator was in the same state."""
        if isinstance(self._numpy[0], bytes) and isinstance(other._numpy[0], bytes):
            return bool(self._numpy == other._numpy)
        first, last = self.numpy(), other.numpy()
        return first[0] == last[0] and first[2:] == last[2:] and np.array_equal(first[1], last[1])


def keep_host() -> HostStates:
    """Return the present states of both generators: the same object as before, if neither has drawn since."""
    global _known
    known = _known
    if known is None or known.of is not random.getstate or known.of_numpy is not numpy_random.get_state:
        known = _known = _Known()
    if known.signs:
        with known.lock:  # numpy draws many numbers without the interpreter's lock
            sign = _join(known.signs)
        if (
            sign == known.sign
            and known.python.gauss_next is known.last._python[1]
            and known.numpy._bit_generator is known.bits
        ):
            return known.last
        known.sign = b""
    known.last = HostStates(known.read(), known.read_numpy())
    if known.signs:
        known.sign = _sign_of(known.last)
    return known.last


Reader = Callable[[], tuple[Any, Any]]
_join = b"".join


class _Known:
    """The readers of both generators, and what was read last.

    After a backward pass the processor's caches have none of this. So whether a generator has drawn is seen in one
    call, from few bytes.
    """

    __slots__ = (
        "bits",
        "last",
        "lock",
        "numpy",
        "of",
        "of_numpy",
        "python",
        "read",
        "read_numpy",
        "sign",
        "signs",
    )

    def __init__(self) -> None:
        self.of, self.of_numpy = random.getstate, numpy_random.get_state
        """The official functions, which a program may replace."""
        self.python: Any = getattr(self.of, "__self__", None)
        self.numpy: Any = getattr(self.of_numpy, "__self__", None)
        python, of_numpy = _python_reader(self.python), _numpy_reader(self.numpy)
        self.read, self.read_numpy = python or _python, of_numpy or _numpy
        self.bits: Any = None
        self.signs: tuple[memoryview, ...] = ()
        """The bytes that say whether a generator has drawn; () where one has to be asked officially."""
        self.sign = b""
        """The bytes of `last`."""
        self.last = HostStates((None, None), (None, None))
        if python is not None and of_numpy is not None:
            self.bits = bits = getattr(self.numpy, "_bit_generator")  # noqa: B009
            self.lock = bits.lock
            address, offset = bits.ctypes.state_address, _gauss_of_numpy()
            assert offset is not None
            self.signs = (
                _bytes_at(id(self.python) + object.__basicsize__, _SIGN),
                _bytes_at(address, _SIGN),
                _bytes_at(address + 4 * _WORDS, 4),
                _bytes_at(id(self.numpy) + offset, 16),
            )


def _bytes_at(address: int, count: int) -> memoryview:
    return memoryview((ctypes.c_char * count).from_address(address)).cast("B")


def _sign_of(states: HostStates) -> bytes:
    """Return what the bytes of `_Known.signs` were in these states; b"" if one was not read from memory."""
    (words, _), (others, gauss) = states._python, states._numpy
    if not isinstance(words, bytes) or not isinstance(others, bytes):
        return b""
    return words[:_SIGN] + others[:_SIGN] + others[4 * _WORDS :] + gauss  # type: ignore[no-any-return]


_known: _Known | None = None


def _python() -> tuple[None, Any]:
    return None, random.getstate()


def _numpy() -> tuple[None, Any]:
    return None, np.random.get_state()


def _may_look() -> bool:
    """Return whether objects lie where `id` says, and nothing else runs while one is read."""
    locked: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    return sys.implementation.name == "cpython" and locked()


def _python_reader(generator: object) -> Reader | None:
    """Return a function that reads this generator: its position and words, and the second of a pair of gaussians."""
    if type(generator) is not random.Random or not _may_look():
        return None
    if not _python_is_known():
        return None
    known: Any = generator
    memory = _Memory.from_address(id(generator) + object.__basicsize__)
    last: tuple[Any, Any] = None, None

    def read() -> tuple[Any, Any]:
        nonlocal last
        sign = memory[:_SIGN], known.gauss_next  # the position comes first
        if sign != last[0]:
            last = sign, (memory.raw, sign[1])
        return last[1]  # type: ignore[no-any-return]

    return read


@functools.cache
def _python_is_known() -> bool:
    if random.Random.__basicsize__ < object.__basicsize__ + _BYTES:
        return False
    twin = random.Random(20210)
    for _ in range(3):
        twin.gauss(0.0, 1.0)
        kept = HostStates(
            (ctypes.string_at(id(twin) + object.__basicsize__, _BYTES), getattr(twin, "gauss_next", "")), None
        )
        if kept.python() != twin.getstate():
            return False
    return True


def _numpy_reader(generator: object) -> Reader | None:
    """Return a function that reads this generator: its words and position, and the second of a pair of gaussians."""
    if type(generator) is not np.random.RandomState or not _may_look():
        return None
    offset = _gauss_of_numpy()
    bits = getattr(generator, "_bit_generator", None)
    if offset is None or type(bits) is not np.random.MT19937:
        return None
    memory, lock = _Memory.from_address(bits.ctypes.state_address), bits.lock
    gauss = _Gauss.from_address(id(generator) + offset)
    last: tuple[Any, Any] = None, None

    def read() -> tuple[Any, Any]:
        nonlocal last
        if generator._bit_generator is not bits:
            return _numpy()  # numpy.random.set_bit_generator
        with lock:  # numpy draws many numbers without the interpreter's lock
            sign = memory[:_SIGN], memory[4 * _WORDS :], gauss.raw
            if sign != last[0]:
                last = sign, (memory.raw, sign[2])
            return last[1]  # type: ignore[no-any-return]

    return read


@functools.cache
def _gauss_of_numpy() -> int | None:
    """Return the offset in a `RandomState` of the flag for a stored gaussian, 8 bytes before it; None: unknown."""
    twin: Any = np.random.RandomState(20210)
    twin.standard_normal()
    memory = ctypes.string_at(id(twin), np.random.RandomState.__basicsize__)
    bits = getattr(twin, "_bit_generator", None)
    if type(bits) is not np.random.MT19937:
        return None
    offset = memory.find(struct.pack("=d", twin.get_state()[4])) - 8
    if offset < object.__basicsize__:
        return None
    for _ in range(3):
        kept = HostStates(
            None,
            (ctypes.string_at(bits.ctypes.state_address, _BYTES), ctypes.string_at(id(twin) + offset, 16)),
        )
        official, found = twin.get_state(), kept.numpy()
        if (found[0], *found[2:]) != (official[0], *official[2:]) or not np.array_equal(
            found[1], official[1]
        ):
            return None
        twin.standard_normal()
    return offset
