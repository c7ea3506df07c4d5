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
    """Return the present states of both generators."""
    python, of_numpy = _readers(
        getattr(random.getstate, "__self__", None), getattr(np.random.get_state, "__self__", None)
    )
    return HostStates(python(), of_numpy())


Reader = Callable[[], tuple[Any, Any]]


@functools.lru_cache(maxsize=4)
def _readers(python: object, of_numpy: object) -> tuple[Reader, Reader]:
    return _python_reader(python) or _python, _numpy_reader(of_numpy) or _numpy


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
            (
                ctypes.string_at(bits.ctypes.state_address, _BYTES),
                ctypes.string_at(id(twin) + offset, 16),
            ),
        )
        official, found = twin.get_state(), kept.numpy()
        if (found[0], *found[2:]) != (official[0], *official[2:]) or not np.array_equal(
            found[1], official[1]
        ):
            return None
        twin.standard_normal()
    return offset
