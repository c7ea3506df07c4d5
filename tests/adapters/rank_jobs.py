"""Share what jobs of several ranks do under every framework that has an environment of its own."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from scarctl.errors import ScarError
from scarctl.session.session import Session

HALF, LAST = 4, 8
At = Mapping[int, Callable[[Session], object]]
"""What is called with the session, by the step after which it is called."""


class Train(Protocol):
    """Attaches, resumes, trains until step `until`, closes, and returns a report."""

    def __call__(self, folder: Path, until: int, kind: Any) -> dict[str, Any]: ...


class _Texts(logging.Handler):
    """A handler that keeps the texts of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def warnings() -> Iterator[list[str]]:
    """Yield a list that receives scarctl's warnings."""
    handler, log = _Texts(), logging.getLogger("scarctl")
    log.addHandler(handler)
    try:
        yield handler.texts
    finally:
        log.removeHandler(handler)


def described(session: Session) -> dict[str, Any]:
    """Return how a session has resumed, and the newest finished iteration."""
    resumed = session.resumed
    return {
        "step": resumed.step,
        "head": session.head_step,
        "consistent": resumed.consistent,
        "reasons": list(resumed.reasons),
        "ranks": resumed.ranks and {key: resumed.ranks[key] for key in ("lost", "steps", "step")},
    }


def one_run(train: Train, folder: str, until: int, kind: Any) -> Any:
    """Return the report of one run, new or resumed; or the error's class and message."""
    try:
        return train(Path(folder), until, kind)
    except ScarError as error:
        return f"{type(error).__name__}: {error}"


def halves(train: Train, folder: str, kinds: list[Any]) -> list[Any]:
    """Return for each kind a run, and the same run closed halfway and resumed."""
    found = []
    for number, kind in enumerate(kinds):
        here = Path(folder, str(number))
        whole = train(here / "whole", LAST, kind)
        train(here / "halves", HALF, kind)
        found.append([whole, train(here / "halves", LAST, kind)])
    return found
