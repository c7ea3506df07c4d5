"""Define one run of a program in a rehearsal: the command passes it to the program in an environment variable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from scarctl.config.environment import REHEARSAL
from scarctl.errors import UsageError

ARENA = "scarctl-rehearsal-"
"""Begin of the names of the folders that hold a rehearsal's memory."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the program, and what is to happen to it."""

    folder: str
    """Folder of its stores and records."""
    reference: str
    """Folder of the undisturbed run to compare with; "" for that run itself."""
    arena: str
    """Name of the folder for its memory, below the program's own `arena_dir`."""
    steps: int
    """The program ends after this step."""
    interval: int
    """Steps between two checkpoints."""
    stop: int = 0
    """The step after which `signal` is sent; 0: none."""
    signal: int = 0

    @property
    def signalled(self) -> Path:
        """A file that exists once the signal was sent."""
        return Path(self.folder, "signalled")

    @property
    def survived(self) -> Path:
        """A file that exists once the program has reached the last step in spite of the signal."""
        return Path(self.folder, "survived")

    def to_environment(self) -> dict[str, str]:
        """Return the environment variable of the program's processes."""
        return {REHEARSAL: json.dumps(asdict(self))}

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Run | None:
        """Return the run that this process is part of, if any. Raises UsageError for a variable of another origin."""
        text = environ.get(REHEARSAL)
        if not text:
            return None
        try:
            run = cls(**json.loads(text))
            sound = all(isinstance(getattr(run, name), kind) for name, kind in _FIELDS.items())
        except (ValueError, TypeError):
            sound = False
        if not sound:
            raise UsageError(
                f"{REHEARSAL} cannot be read", hint="`scarctl rehearse` sets it: unset it elsewhere"
            )
        return run


_FIELDS = {
    **dict.fromkeys(("folder", "reference", "arena"), str),
    **dict.fromkeys(("steps", "interval", "stop", "signal"), int),
}
