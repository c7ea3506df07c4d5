"""Capture, restore and compare the global random number generators, and find those of a data loader."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from scarctl.state.torch_dtypes import Deferred
from scarctl.stateful import host_rng_of, restore_host_rng
from scarctl.util.generators import HostStates, keep_host

_WORDS = 624
"""Words of a Mersenne twister, the algorithm of all three global generators."""
_MOST = 4096
"""Most blocks of words that are generated to count draws."""


class Raw(Deferred):
    """The states of the global generators of Python, numpy, torch, and CUDA if it is in use, as they were read.

    Reading them takes a few microseconds. Converting them into the saved form, `value`, takes longer.
    """

    __slots__ = ("cuda", "host", "torch")

    def __init__(self) -> None:
        self.host = keep_host()
        self.torch = torch.default_generator.get_state()
        # Not `is_available`, which asks the driver.
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]

    def value(self) -> dict[str, Any]:
        """Return the states in the form that is saved."""
        return host_rng_of(self.host) | {"torch": self.torch, "cuda": self.cuda}

    def same_on_host(self, other: Raw) -> bool:
        """Return whether the generators on the host were in the same states."""
        return (
            self.host.same_python(other.host)
            and self.host.same_numpy(other.host)
            and torch.equal(self.torch, other.torch)
        )


raw = Raw
"""Returns the generators' states, to be interpreted later if at all."""


def capture_rng() -> dict[str, Any]:
    """Return the states of the global random number generators of Python, numpy, torch, and CUDA if it is in use."""
    return Raw().value()


def restore_rng(state: Mapping[str, Any] | Raw) -> None:
    """Restore the result of `capture_rng` or `raw`; states of missing CUDA devices are ignored."""
    if isinstance(state, Raw):
        state = state.value()
    restore_host_rng(state)
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Restore the CPU generators at exit, so that draws inside leave no trace."""
    before = Raw()
    try:
        yield
    finally:
        after = Raw()
        if not before.host.same_python(after.host):
            random.setstate(before.host.python())
        if not before.host.same_numpy(after.host):
            np.random.set_state(before.host.numpy())
        if not torch.equal(before.torch, after.torch):
            torch.set_rng_state(before.torch)


def digests(state: Raw) -> dict[str, str]:
    """Return a digest of each generator's state, by the generator's name: 24 hex digits."""
    numpy = state.host.numpy()
    return {
        "python": _python_digest(state.host),
        "numpy": _digest(repr((numpy[0], numpy[2:])).encode() + numpy[1].tobytes()),
        "torch": _digest(state.torch.numpy().tobytes()),
    }


@functools.lru_cache(2)
def _python_digest(host: HostStates) -> str:
    """Digest Python's generator. Most loops do not draw from it, and keep the same states for long."""
    return _digest(repr(host.python()).encode())


def _digest(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=12).hexdigest()


def draws(before: Raw, after: Raw) -> list[int] | None:
    """Count the words that each generator drew between two captures; None if that is impossible."""
    found = []
    for first, last in zip(map(_twister, _parts(before)), map(_twister, _parts(after)), strict=True):
        count = _count(*first, *last)
        if count is None:
            return None
        found.append(count)
    return found


def _parts(state: Raw) -> list[Any]:
    return [("python", state.host.python()), ("numpy", state.host.numpy()), ("torch", state.torch)]


def _twister(part: tuple[str, Any]) -> tuple[Any, int]:
    """Return the words and the position of a generator."""
    name, state = part
    if name == "python":
        return np.array(state[1][:-1], dtype=np.uint32), state[1][-1]
    if name == "numpy":
        return np.asarray(state[1], dtype=np.uint32), int(state[2])
    # Torch's memory layout: seed, left, seeded, next, words.
    data = state.numpy()
    left = int(data[8:12].view(np.int32)[0])
    words = data[24 : 24 + 8 * _WORDS].view(np.uint64).astype(np.uint32)
    return words, _WORDS + 1 - left


def _count(words: Any, position: int, last_words: Any, last_position: int) -> int | None:
    if np.array_equal(words, last_words):
        return last_position - position if last_position >= position else None
    twister = np.random.RandomState()
    state: Any = ("MT19937", words, _WORDS, 0, 0.0)
    for block in range(1, _MOST + 1):
        twister.set_state(state)
        twister.bytes(4)
        now: Any = twister.get_state()
        if np.array_equal(now[1], last_words):
            return block * _WORDS - position + last_position
        state = ("MT19937", now[1], _WORDS, 0, 0.0)
    return None


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the private generators of a loader and its samplers, in a stable order."""
    owners, found = [loader], list[torch.Generator]()
    for owner in owners:
        for name in ("generator", "synchronized_generator"):
            generator = getattr(owner, name, None)
            if isinstance(generator, torch.Generator) and all(generator is not other for other in found):
                found.append(generator)
        inner = (getattr(owner, name, None) for name in ("sampler", "batch_sampler", "base_dataloader"))
        owners += [item for item in inner if item is not None and all(item is not other for other in owners)]
    return found


def untransformed() -> AbstractContextManager[object]:
    """Leave the transformations of `torch.func` that run in this thread: inside them no operation has plain results."""
    if peek_interpreter_stack() is None:
        return nullcontext()
    return temporarily_clear_interpreter_stack()


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a transformation of `torch.func` has wrapped: the wrapper cannot be read once its function ends."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor
