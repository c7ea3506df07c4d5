"""Capture and restore the global random number generators, and find those of a data loader."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from scarctl.state.torch_dtypes import Deferred
from scarctl.stateful import host_rng_of, restore_host_rng
from scarctl.util.generators import keep_host


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
