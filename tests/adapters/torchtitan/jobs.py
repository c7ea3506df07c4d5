"""Jobs of several ranks that train under torchtitan's Trainer. Run by `tests.distributed.launch`."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from scarctl.config import grouped
from scarctl.errors import ScarError
from scarctl.session.session import Session
from tests.adapters.torchtitan import models

HALF, LAST = 4, 8
Kind = Mapping[str, Any]
"""Arguments of `models.trainer`."""


class Warnings(logging.Handler):
    """Keeps the warnings of a session."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        self.texts.append(record.getMessage())


def train(
    folder: Path, until: int, kind: Kind, at: Mapping[int, Callable[[Session], object]] | None = None
) -> dict[str, Any]:
    """Build a Trainer, train until step `until`, and close. Return digests at the beginning and end, and more.

    at: called with the session after these steps; 0 is before the first one.
    """
    (folder / "arena").mkdir(exist_ok=True, parents=True)
    found: dict[str, Any] = {}

    def visit(session: Session) -> None:
        if not found:
            ranks = session.resumed.ranks
            found.update(
                step=session.resumed.step,
                exact=session.resumed.exact,
                reasons=list(session.resumed.reasons),
                ranks=ranks and {key: ranks[key] for key in ("lost", "steps", "step")},
                first=models.digests(trainer),
            )
        found["head"] = session.head_step
        if at is not None and session.head_step in at:
            at[session.head_step](session)

    options = grouped(interval=2, fraction=0.25, arena_dir=str(folder / "arena"))
    manager = models.Visited.Config(interval=1000, options=options, visit=visit)
    world = dist.get_world_size() if dist.is_initialized() else 1
    heard = Warnings()
    logging.getLogger("scarctl").addHandler(heard)
    trainer = models.trainer(
        folder, until, manager, ranks=world // kind.get("tensor_parallel_degree", 1), **kind
    )
    try:
        trainer.train()
    finally:
        trainer.close()
        logging.getLogger("scarctl").removeHandler(heard)
    losses = trainer.metrics_processor.losses
    return {**found, "last": models.digests(trainer), "losses": losses, "warnings": heard.texts}


# -- run by `launch` ---------------------------------------------------------------------------------------------


def undisturbed(rank: int, world: int, folder: str, kinds: list[Kind]) -> list[Any]:
    """For each: a run, and the same run, ended halfway and resumed."""
    found = []
    for number, kind in enumerate(kinds):
        here = Path(folder, str(number))
        whole = train(here / "whole", LAST, kind)
        train(here / "halves", HALF, kind)
        found.append([whole, train(here / "halves", LAST, kind)])
    return found


def one_run(rank: int, world: int, folder: str, until: int, kind: Kind) -> Any:
    """One run, new or resumed; or the error's class and message."""
    try:
        return train(Path(folder), until, kind)
    except ScarError as error:
        return f"{type(error).__name__}: {error}"


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

    report = train(Path(folder), LAST, kind, {3: save, 6: lose})
    return {**found, "losses": report["losses"], "head": report["head"]}


def main(folder: str, kind: str, saved: str, killed: str) -> None:
    """One rank of a job under torchrun. Rank 1 kills itself after step `killed` of its first life.

    kind: JSON. saved: step after which everything is saved, sealed.
    """
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    rank = int(os.environ["RANK"])

    def visit(session: Session) -> None:
        if session.head_step == int(saved):
            session.checkpoint(full=True, wait=True)
        if session.head_step == int(killed) and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    at = dict.fromkeys((int(saved), int(killed)), visit) if first else {}
    dist.init_process_group("gloo")
    report = train(Path(folder), LAST, json.loads(kind), at)
    Path(folder, f"report-{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
