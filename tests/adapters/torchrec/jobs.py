"""Run jobs of several ranks that train tables sharded by TorchRec. Started by `tests.distributed.launch`."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import scarctl
from scarctl.adapter import find_adapter
from scarctl.config import grouped
from scarctl.distributed.collectives import Solo, Team
from scarctl.session.session import Session
from scarctl.util.ranks import world_size
from tests.adapters.rank_jobs import HALF, LAST, At, described, halves, warnings
from tests.adapters.rank_jobs import one_run as run_once
from tests.adapters.torchrec import models

Kinds = str | tuple[str, str] | list[str]
"""How tables are sharded, and which optimizer trains them: "table" or ("table", "rowwise")."""


def train(
    folder: Path,
    until: int,
    kinds: Kinds,
    *,
    dense: bool = True,
    at: At | None = None,
    resume: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Attach, resume, train until step `until`, and close. Return digests at the beginning and end, and the warnings.

    at: called with the session after these steps.
    """
    kind, fused = (kinds, "adagrad") if isinstance(kinds, str) else kinds
    model, optimizer = models.build(kind, fused, dense=dense)
    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed(7 + rank)
    (folder / "arena").mkdir(exist_ok=True, parents=True)
    given = {"interval": 2, "fraction": 0.25, "arena_dir": str(folder / "arena"), **options}
    with warnings() as heard:
        extras = {"position": (position := {"step": 0})}
        with scarctl.attach(
            model, optimizer, store=folder / "store", extras=extras, **grouped(**given)
        ) as session:
            resumed = session.resume(**(resume or {}))
            first = digests(model, optimizer)
            for step in range(resumed.step, until):
                position["step"] = step + 1
                one_step(model, optimizer, step, rank)
                if at is not None and step + 1 in at:
                    at[step + 1](session)
            found = described(session)
    return {**found, "first": first, "last": digests(model, optimizer), "warnings": heard}


def one_step(model: Any, optimizer: Any, step: int, rank: int) -> None:
    """Do one iteration, as in TorchRec's examples. Learning rates fall; dropout draws.

    Nothing changes after the step: a state saved right after it equals that of a rank which has continued.
    """
    optimizer.zero_grad()
    model(models.batch(step * 10 + rank)).square().mean().backward()
    for group in optimizer.param_groups:
        group["lr"] *= 0.98
    optimizer.step()


def digests(model: Any, optimizer: Any) -> dict[str, str]:
    """Return digests of all tensors by name; of tensors in parts, digests of the whole tensor. A collective."""
    mine: dict[str, Any] = {}
    for name, value in models.local_parts(model, optimizer):
        sharded = hasattr(value, "local_shards")
        parts = (
            [(s.metadata.shard_offsets, s.tensor) for s in value.local_shards()]
            if sharded
            else [([0] * value.dim(), value)]
        )
        found = [[list(first), part.detach().double().tolist()] for first, part in parts]
        mine[name] = [list(value.size()), found]
    team = Team() if world_size() > 1 else Solo()
    try:
        every = team.gather(mine)
    finally:
        team.close()
    whole: dict[str, torch.Tensor] = {}
    for of_rank in every:
        for name, (shape, boxes) in of_rank.items():
            tensor = whole.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))
            for offsets, values in boxes:
                part = torch.tensor(values, dtype=torch.float64)
                box = tuple(slice(a, a + n) for a, n in zip(offsets, part.shape, strict=True))
                tensor[box or ...] = part
    return {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:12]
        for name, tensor in sorted(whole.items())
    }


# -- run by `launch` ---------------------------------------------------------------------------------------------


def undisturbed(rank: int, world: int, folder: str, kinds: list[Kinds]) -> list[Any]:
    """Return for each plan a run, and the same run closed halfway and resumed."""
    return halves(train, folder, kinds)


def resharded(rank: int, world: int, folder: str, pairs: list[tuple[Kinds, Kinds]]) -> list[Any]:
    """Return for each pair of plans a run that changes from the first to the second, or the class of the error."""
    found = []
    for number, (before, after) in enumerate(pairs):
        here = Path(folder, str(number))
        ended = train(here, HALF, before)
        found.append([ended, run_once(train, str(here), LAST, after)])
    return found


def one_run(rank: int, world: int, folder: str, until: int, kinds: Kinds) -> Any:
    """Return the report of one run, new or resumed."""
    return run_once(train, folder, until, kinds)


def touched(rank: int, world: int, kinds: list[Kinds]) -> list[list[Any]]:
    """Return for each table its name, the rows touched and the rows changed by a step, of this rank's parts."""
    return [row for kind in kinds for row in _touched(kind, rank)]


def _touched(kinds: Kinds, rank: int) -> list[list[Any]]:
    kind, fused = (kinds, "adagrad") if isinstance(kinds, str) else kinds
    model, optimizer = models.build(kind, fused)
    adapter = find_adapter(model, [optimizer])
    asked: list[Mapping[str, torch.Tensor]] = []
    remove = adapter.install(lambda: asked.append(adapter.touched_rows(dense=False)), lambda: None)
    one_step(model, optimizer, 0, rank)
    parts = {g.name: g.tensors[""] for g in adapter.groups() if ".embedding_bags." in g.name}
    before = {name: part.clone() for name, part in parts.items()}
    asked.clear()
    one_step(model, optimizer, 1, rank)
    remove()
    found: list[list[Any]] = []
    for name, part in parts.items():
        rows = [given[name] for given in asked if name in given]
        changed = (part != before[name]).any(1).nonzero().flatten().tolist()
        found.append([name, sorted(set(torch.cat(rows).tolist())) if rows else [], changed])
    return found


def stopped_in_backward(rank: int, world: int, folder: str) -> None:
    """Get SIGTERM in the backward pass of step 5, right before tables are changed, and take no further step."""

    def arm(session: Session) -> None:
        def stop(_: torch.Tensor) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

        def hook(module: torch.nn.Module, args: object, output: object) -> None:
            if isinstance(module, torch.nn.Linear) and isinstance(output, torch.Tensor):
                output.register_hook(stop)

        torch.nn.modules.module.register_module_forward_hook(hook)

    def wait(session: Session) -> None:
        while True:
            signal.pause()

    train(Path(folder), LAST, "table", at={4: arm, 5: wait})


def recovered(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Save everything after step 3. After step 6 lose rank 1's rows, and recover them. Return both states."""
    kept: dict[int, dict[str, Any]] = {}
    model, optimizer = models.build("row", "rowwise")
    arena = Path(folder, "arena")
    arena.mkdir(exist_ok=True)
    options = grouped(interval=100, fraction=0.25, arena_dir=str(arena))
    with scarctl.attach(model, optimizer, store=Path(folder, "store"), **options) as session:
        session.resume()
        for step in range(6):
            one_step(model, optimizer, step, rank)
            if step == 2:
                session.checkpoint(full=True, wait=True)
            kept[step + 1] = _rows(model, optimizer)
        if rank == 1:
            for name, value in models.local_values(model, optimizer).items():
                if ".embedding_bags." in name:
                    value.detach().fill_(torch.nan)
        report = session.recover("rank:1")
        now = _rows(model, optimizer)
        one_step(model, optimizer, 6, rank)
    tables = [name for name in now if ".embedding_bags." in name]
    return {
        "restored": report.restored_partitions,
        "as_saved": all(now[name] == kept[3][name] for name in tables),
        "as_before": all(now[name] == kept[6][name] for name in tables),
        "tables": len(tables),
    }


def _rows(model: Any, optimizer: Any) -> dict[str, Any]:
    values = models.local_values(model, optimizer)
    return {name: value.detach().tolist() for name, value in values.items()}
