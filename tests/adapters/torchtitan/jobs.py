"""Run jobs of several ranks that train under torchtitan's Trainer. Started by `tests.distributed.launch`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import distributed as dist

from scarctl.config import grouped
from scarctl.session.session import Session
from tests.adapters.rank_jobs import described, halves, warnings
from tests.adapters.rank_jobs import one_run as run_once
from tests.adapters.torchtitan import models

Kind = Mapping[str, Any]
"""Arguments of `models.trainer`."""


def train(folder: Path, until: int, kind: Kind) -> dict[str, Any]:
    """Build a Trainer, train until step `until`, and close. Return digests at the beginning and end, and more."""
    (folder / "arena").mkdir(exist_ok=True, parents=True)
    found: dict[str, Any] = {}

    def visit(session: Session) -> None:
        if not found:
            found.update(described(session), first=models.digests(trainer))
        found["head"] = session.head_step

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
