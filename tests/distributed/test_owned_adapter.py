"""Test with real processes and wrappers that the ranks' parts are the whole state, each value once, restored."""

from __future__ import annotations

from functools import cache

import pytest

from tests.distributed.launch import launch

SETUPS = {
    2: ["ddp", "by-hand", "zero", "fsdp", "fsdp-offload", "tensor-parallel", "experts"],
    4: ["places", "fsdp-empty", "hsdp", "fsdp-and-tensor-parallel", "data-and-tensor-parallel"],
}


@cache
def results(world: int) -> list[dict[str, str]]:
    """Return every rank's findings. All setups of one size share a start, because importing torch takes longest."""
    found: list[dict[str, str]] = launch("tests.distributed.checks:run", world, SETUPS[world])
    return found


@pytest.mark.parametrize(
    ("world", "name"), [(world, name) for world, names in SETUPS.items() for name in names]
)
def test_every_byte_is_owned_once_and_comes_back(world: int, name: str) -> None:
    for rank, found in enumerate(results(world)):
        assert name in found, "a setup before this one failed"
        assert not found[name], f"rank {rank}: {found[name]}"
