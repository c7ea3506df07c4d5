"""Run jobs of several ranks that train under torchtitan's Trainer. Started by `tests.distributed.launch`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from scarctl.config import grouped
from scarctl.session.session import Session
from tests.adapters.rank_jobs import LAST, At, described, halves, under_torchrun, warnings
from tests.adapters.rank_jobs import one_run as run_once
from tests.adapters.torchtitan import models

Kind = Mapping[str, Any]
"""Arguments of `models.trainer`."""


def train(folder: Path, until: int, kind: Kind, *, at: At | None = None) -> dict[str, Any]:
    """Build a Trainer, train until step `until`, and close. Return digests at the beginning and end, and more.

    at: called with the session after these steps; 0 is before the first one.
    """
    (folder / "arena").mkdir(exist_ok=True, parents=True)
    found: dict[str, Any] = {}

    def visit(session: Session) -> None:
        if not found:
            found.update(described(session), first=models.digests(trainer))
        found["head"] = session.head_step
        if at is not None and session.head_step in at:
            at[session.head_step](session)

    options = grouped(interval=2, fraction=0.25, arena_dir=str(folder / "arena"))
    manager = models.Visited.Config(interval=1000, options=options, visit=visit)
    world = dist.get_world_size() if dist.is_initialized() else 1
    with warnings() as heard:
        trainer = models.trainer(
            folder, until, manager, ranks=world // kind.get("tensor_parallel_degree", 1), **kind
        )
        with contextlib.closing(trainer):
            trainer.train()
    losses = trainer.metrics_processor.losses
    return {**found, "last": models.digests(trainer), "losses": losses, "warnings": heard}


# -- run by `launch` ---------------------------------------------------------------------------------------------


def undisturbed(rank: int, world: int, folder: str, kinds: list[Kind]) -> list[Any]:
    """Return for each kind a run, and the same run ended halfway and resumed."""
    return halves(train, folder, kinds)


def one_run(rank: int, world: int, folder: str, until: int, kind: Kind) -> Any:
    """Return the report of one run, new or resumed."""
    return run_once(train, folder, until, kind)


def recovered(rank: int, world: int, folder: str, kind: Kind) -> dict[str, Any]:
    """Save everything after step 3; after step 6 rank 1's parts are lost, and come back. Return what has changed."""
    kept: dict[int, dict[str, torch.Tensor]] = {}
    found: dict[str, Any] = {}

    def save(session: Session) -> None:
        session.checkpoint(full=True, wait=True)
        kept[3] = {group.name: group.tensors[""].clone() for group in session.adapter.groups()}

    def lose(session: Session) -> None:
        groups = session.adapter.groups()
        kept[6] = {group.name: group.tensors[""].clone() for group in groups}
        if rank == 1:
            for group in groups:
                for tensor in group.tensors.values():
                    tensor.fill_(torch.nan)
        found["problems"] = list(session.recover("rank:1").problems)
        now = {group.name: group.tensors[""] for group in session.adapter.groups()}
        found["back"] = [bool(torch.equal(now[name], kept[3][name])) for name in now]
        found["same"] = [bool(torch.equal(now[name], kept[6][name])) for name in now]

    report = train(Path(folder), LAST, kind, at={3: save, 6: lose})
    return {**found, "losses": report["losses"], "head": report["head"]}


if __name__ == "__main__":
    under_torchrun(train, *sys.argv[1:])
