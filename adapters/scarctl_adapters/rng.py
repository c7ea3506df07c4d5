"""Global random number generators, of the host and of CUDA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from scarctl.stateful import capture_host_rng, restore_host_rng


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
