"""Test a layer that is thawed in mid-run under DistributedDataParallel, stopped on both sides of that."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import scarctl
from tests.distributed.launch import launch
from tests.support.training import drained

STEPS, THAWN = 9, 5


def train(rank: int, world: int, folder: str, early: bool, until: int, end: str) -> dict[str, Any]:
    """Train up to iteration `until`, and return how it was resumed, and a digest of the parameters.

    early: the layer is frozen before the model is wrapped, so that nothing averages its gradients later, instead of
    after `attach`. end: "flush" seals the state and leaves it; "kill" saves it and ends the process; "" closes the
    session.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    body = model[0].requires_grad_(not early)
    wrapped = DistributedDataParallel(model, find_unused_parameters=not early)
    kind: Any = (
        torch.optim.SGD if early else torch.optim.Adam
    )  # SGD has no state that a thawed layer could gain
    optimizer = kind(model.parameters(), lr=0.01)
    Path(folder, "arena").mkdir(parents=True, exist_ok=True)
    settings = scarctl.Settings(arena_dir=f"{folder}/arena", daemon=False)
    session = scarctl.attach(wrapped, optimizer, store=f"{folder}/store", interval=2, settings=settings)
    found = session.resume()
    for number in session.batches(range(1, STEPS + 1)):
        if number > until:
            break
        body.requires_grad_(number >= THAWN)
        generator = torch.Generator().manual_seed(100 * number + rank)
        optimizer.zero_grad()
        wrapped(torch.randn(16, 4, generator=generator)).square().mean().backward()
        optimizer.step()
    if end == "flush":
        session.flush()
        drained([session])
        session._opening.close(failed=True)
    elif end == "kill":
        session.checkpoint(full=True, wait=True)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        session.close()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    resumed = session.resumed or found
    return {
        "step": found.step,
        "consistent": resumed.consistent,
        "reasons": list(resumed.reasons),
        "errors": session.stats.errors,
        "digest": digest,
    }


pytestmark = pytest.mark.long

TRAIN = "tests.distributed.test_thawed:train"


@pytest.mark.parametrize(("until", "end"), [(THAWN - 2, "flush"), (THAWN + 1, "kill")])
def test_what_is_frozen_after_attach_is_thawed_exactly(tmp_path: Path, until: int, end: str) -> None:
    whole = launch(TRAIN, 2, str(tmp_path / "whole"), False, STEPS, "")
    assert whole[0]["digest"] == whole[1]["digest"]
    if end == "kill":
        with pytest.raises(AssertionError, match="ended with -9"):
            launch(TRAIN, 2, str(tmp_path / "stopped"), False, until, end)
    else:
        launch(TRAIN, 2, str(tmp_path / "stopped"), False, until, end)
    for found in launch(TRAIN, 2, str(tmp_path / "stopped"), False, STEPS, ""):
        assert (found["step"], found["consistent"], found["errors"]) == (until, True, 0), found
        assert found["digest"] == whole[0]["digest"]


@pytest.mark.parametrize(("until", "exact"), [(THAWN - 2, True), (THAWN + 1, False)])
def test_what_is_frozen_when_it_is_wrapped_is_never_averaged(tmp_path: Path, until: int, exact: bool) -> None:
    launch(TRAIN, 2, str(tmp_path), True, until, "flush")
    for found in launch(TRAIN, 2, str(tmp_path), True, until, "flush"):
        assert (found["step"], found["consistent"]) == (until, exact), found
        assert exact or any("ranks had different values" in reason for reason in found["reasons"]), found
