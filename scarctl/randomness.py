"""The global random number generators, and the generators that a data loader draws from."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from scarctl.stateful import capture_host_rng, restore_host_rng

_WORDS = 624
"""Words of a Mersenne twister, which all three global generators are."""
_MOST = 4096
"""Blocks of words that are gone through to count what was drawn."""

Raw = tuple[Any, Any, torch.Tensor]
"""States of Python's, numpy's and torch's CPU generator, as each gives its own."""


def capture_rng() -> dict[str, Any]:
    """Global random number generators of Python, numpy, torch, and of CUDA where it is in use."""
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return capture_host_rng() | {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if cuda else [],
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Put `capture_rng` back; CUDA's only as far as there are devices."""
    restore_host_rng(state)
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])


def raw() -> Raw:
    """The CPU generators' states: quicker than `capture_rng`."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Leave the CPU generators as they are, whatever the code inside draws."""
    python, numpy, torched = raw()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torched)


def digests(state: Raw) -> dict[str, str]:
    """A short text for each generator's state."""
    python, numpy, torched = state
    texts = {
        "python": repr(python).encode(),
        "numpy": repr((numpy[0], numpy[2:])).encode() + numpy[1].tobytes(),
        "torch": torched.numpy().tobytes(),
    }
    return {name: hashlib.blake2b(text, digest_size=12).hexdigest() for name, text in texts.items()}


def draws(before: Raw, after: Raw) -> list[int] | None:
    """How many words each generator has drawn in between; None when that cannot be counted."""
    found = []
    for first, last in zip(map(_twister, _parts(before)), map(_twister, _parts(after)), strict=True):
        count = _count(*first, *last)
        if count is None:
            return None
        found.append(count)
    return found


def _parts(state: Raw) -> list[Any]:
    python, numpy, torched = state
    return [("python", python), ("numpy", numpy), ("torch", torched)]


def _twister(part: tuple[str, Any]) -> tuple[Any, int]:
    """Words and position of a generator."""
    name, state = part
    if name == "python":
        return np.array(state[1][:-1], dtype=np.uint32), state[1][-1]
    if name == "numpy":
        return np.asarray(state[1], dtype=np.uint32), int(state[2])
    # As torch lays it out: seed, left, seeded, next, words.
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
    """The generators of a loader and its samplers that are not the global one, in a stable order."""
    owners, found = [loader], list[torch.Generator]()
    for owner in owners:
        for name in ("generator", "synchronized_generator"):
            generator = getattr(owner, name, None)
            if isinstance(generator, torch.Generator) and all(generator is not other for other in found):
                found.append(generator)
        inner = (getattr(owner, name, None) for name in ("sampler", "batch_sampler", "base_dataloader"))
        owners += [item for item in inner if item is not None and all(item is not other for other in owners)]
    return found
