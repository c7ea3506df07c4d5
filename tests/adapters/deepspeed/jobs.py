"""Run jobs of several ranks that train under DeepSpeed's engine. Started by `tests.distributed.launch`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import scarctl
from scarctl.config import grouped
from tests.adapters.deepspeed import models
from tests.adapters.rank_jobs import described, halves, warnings
from tests.adapters.rank_jobs import one_run as run_once

Kind = Mapping[str, Any]
"""Arguments of `models.build`."""


def train(
    folder: Path,
    until: int,
    kind: Kind,
    *,
    resume: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Attach, resume, train until step `until`, and close. Return digests at the beginning and end, and warnings."""
    engine = models.build(**kind)
    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed(7 + rank)
    (folder / "arena").mkdir(exist_ok=True, parents=True)
    given = {"interval": 2, "fraction": 0.25, "arena_dir": str(folder / "arena"), **options}
    with warnings() as heard:
        extras = {"position": (position := {"step": 0})}
        with scarctl.attach(engine, store=folder / "store", extras=extras, **grouped(**given)) as session:
            resumed = session.resume(**(resume or {}))
            first = models.digests(engine)
            for step in range(resumed.step, until):
                position["step"] = step + 1
                models.one_step(engine, step, rank)
            found = described(session)
    last = models.digests(engine)
    engine.destroy()
    return {**found, "first": first, "last": last, "warnings": heard}


# -- run by `launch` ---------------------------------------------------------------------------------------------


def undisturbed(rank: int, world: int, folder: str, kinds: list[Kind]) -> list[Any]:
    """Return for each kind a run, and the same run closed halfway and resumed."""
    return halves(train, folder, kinds)


def one_run(rank: int, world: int, folder: str, until: int, kind: Kind) -> Any:
    """Return the report of one run, new or resumed."""
    return run_once(train, folder, until, kind)


def recovered(rank: int, world: int, folder: str, kind: Kind) -> dict[str, Any]:
    """Save everything after step 3; after step 6 rank 1's runs are lost, and come back. Return what has changed.

    The model's weights have to be those of the master weights afterwards, on every rank.
    """
    engine = models.build(**kind)
    arena = Path(folder, "arena")
    arena.mkdir(exist_ok=True)
    options = grouped(interval=100, fraction=0.25, arena_dir=str(arena))
    kept: dict[int, dict[str, torch.Tensor]] = {}
    with scarctl.attach(engine, store=Path(folder, "store"), **options) as session:
        session.resume()
        for step in range(6):
            models.one_step(engine, step, rank)
            if step == 2:
                session.checkpoint(full=True, wait=True)
            kept[step + 1] = models.values(engine)
        if rank == 1:
            for group in session.adapter.groups():
                if group.kind == "parameter":
                    for tensor in group.tensors.values():
                        tensor.fill_(torch.nan)
        report = session.recover("rank:1")
        now = models.values(engine)
        models.one_step(engine, 6, rank)
        after = models.values(engine)
    trained = [name for name in now if f"{name}/weight" in now]
    return {
        "problems": list(report.problems),
        "restored": report.restored_partitions,
        "mixed": all(
            bool(((now[name] == kept[3][name]) | (now[name] == kept[6][name])).all())
            for name in now
            if name.partition("/")[0] in trained and "/weight" not in name
        ),
        "went_back": any(not torch.equal(now[name], kept[6][name]) for name in trained),
        "stayed": any(bool((now[name] != kept[3][name]).any()) for name in trained),
        "weights": all(
            torch.equal(now[f"{name}/weight"], now[name].to(now[f"{name}/weight"].dtype)) for name in trained
        ),
        "finite": all(bool(torch.isfinite(value).all()) for value in after.values()),
    }
