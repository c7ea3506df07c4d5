"""Share what jobs of several ranks do under every framework that has an environment of its own."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from scarctl.session.session import Session

HALF, LAST = 4, 8
At = Mapping[int, Callable[[Session], object]]
"""What is called with the session, by the step after which it is called."""


class Train(Protocol):
    """Attaches, resumes, trains until step `until`, closes, and returns a report."""

    def __call__(self, folder: Path, until: int, kind: Any, *, at: At | None = None) -> dict[str, Any]: ...


class Warnings(logging.Handler):
    """A handler that keeps the warnings of a session."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        self.texts.append(record.getMessage())


def halves(train: Train, folder: str, kinds: list[Any]) -> list[Any]:
    """Return for each kind a run, and the same run closed halfway and resumed."""
    found = []
    for number, kind in enumerate(kinds):
        here = Path(folder, str(number))
        whole = train(here / "whole", LAST, kind)
        train(here / "halves", HALF, kind)
        found.append([whole, train(here / "halves", LAST, kind)])
    return found


def under_torchrun(train: Train, folder: str, kind: Any, saved: int, killed: int) -> None:
    """Run one rank of a job under torchrun, and write its report. Rank 1 kills itself in its first life.

    saved: the step after which everything is saved and sealed. killed: the step after which rank 1 dies.
    """
    from torch import distributed as dist

    dist.init_process_group("gloo")
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    rank = dist.get_rank()

    def save(session: Session) -> None:
        session.checkpoint(full=True, wait=True)

    def die(session: Session) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    at: dict[int, Any] = {saved: save} if first else {}
    if first:
        before = at.get(killed, lambda session: None)
        at[killed] = lambda session: (before(session), die(session))
    report = train(Path(folder), LAST, kind, at=at)
    Path(folder, f"report-{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()
