"""Test with real processes and wrappers that the ranks' parts are the whole state, each value once, restored."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import scarctl
from scarctl.config import grouped
from tests.distributed.jobs import Bowl
from tests.distributed.launch import launch

SETUPS = {
    2: ["ddp", "by-hand", "zero", "fsdp", "fsdp-offload", "tensor-parallel", "experts"],
    4: ["fsdp-empty", "hsdp", "fsdp-and-tensor-parallel"],
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


def grows(rank: int, world: int, folder: str) -> list[tuple[str, str]]:
    """Add a parameter to the model in mid-run, on rank 1 alone; return the session's caveats."""
    Path(folder, "arena").mkdir(exist_ok=True)
    model = Bowl()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    options = grouped(interval=1000, daemon=False, arena_dir=f"{folder}/arena")
    session = scarctl.attach(model, optimizer, store=f"{folder}/store", **options)
    for step in range(3):
        model().backward()
        optimizer.step()
        if step == 1:
            session.checkpoint(full=True, wait=True)
            assert not list(session.caveats)
            if rank == 1:
                model.more = torch.nn.Parameter(torch.ones(2))
    session.checkpoint(full=True, wait=True)
    said = [(caveat.kind, caveat.message) for caveat in session.caveats]
    session.close()
    return said


def test_a_parameter_that_is_added_later_is_said_not_to_be_saved(tmp_path: Path) -> None:
    first, second = launch("tests.distributed.test_owned_adapter:grows", 2, str(tmp_path))
    assert not first
    assert [kind for kind, _ in second] == ["new-state"]
    assert "'more'" in second[0][1]
