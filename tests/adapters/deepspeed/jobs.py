"""Jobs of several ranks that train under DeepSpeed's engine. Run by `tests.distributed.launch`."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import scarctl
from scarctl.config import grouped
from scarctl.errors import ScarError
from tests.adapters.deepspeed import models
from tests.adapters.rank_jobs import At, Warnings, halves, under_torchrun

Kind = Mapping[str, Any]
"""Arguments of `models.build`."""


def train(
    folder: Path,
    until: int,
    kind: Kind,
    *,
    at: At | None = None,
    resume: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Attach, resume, train until step `until`, and close. Return digests at the beginning and end, and what was said.

    at: called with the session after these steps.
    """
    engine = models.build(**kind)
    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed(7 + rank)
    (folder / "arena").mkdir(exist_ok=True, parents=True)
    given = {"interval": 2, "fraction": 0.25, "arena_dir": str(folder / "arena"), **options}
    heard = Warnings()
    logging.getLogger("scarctl").addHandler(heard)
    try:
        extras = {"position": (position := {"step": 0})}
        with scarctl.attach(engine, store=folder / "store", extras=extras, **grouped(**given)) as session:
            resumed = session.resume(**(resume or {}))
            first = models.digests(engine)
            for step in range(resumed.step, until):
                position["step"] = step + 1
                models.one_step(engine, step, rank)
                if at is not None and step + 1 in at:
                    at[step + 1](session)
            exact, reasons = session.resumed.exact, list(session.resumed.reasons)
            head = session.head_step
    finally:
        logging.getLogger("scarctl").removeHandler(heard)
    last = models.digests(engine)
    engine.destroy()
    return {
        "step": resumed.step,
        "head": head,
        "exact": exact,
        "reasons": reasons,
        "ranks": resumed.ranks and {key: resumed.ranks[key] for key in ("lost", "steps", "step")},
        "first": first,
        "last": last,
        "warnings": heard.texts,
    }


# -- run by `launch` ---------------------------------------------------------------------------------------------


def undisturbed(rank: int, world: int, folder: str, kinds: list[Kind]) -> list[Any]:
    """For each: a run, and the same run, closed halfway and resumed."""
    return halves(train, folder, kinds)


def one_run(rank: int, world: int, folder: str, until: int, kind: Kind) -> Any:
    """One run, new or resumed; or the error's class and message."""
    try:
        return train(Path(folder), until, kind)
    except ScarError as error:
        return f"{type(error).__name__}: {error}"


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


def main(folder: str, kind: str, saved: str, killed: str) -> None:
    """Run one rank of a job under torchrun: see `under_torchrun`. kind: JSON."""
    under_torchrun(train, folder, json.loads(kind), int(saved), int(killed))


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
