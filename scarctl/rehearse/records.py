"""Read and write what the sessions of a rehearsed program report to the command, as files in the run's folder.

A session is named by its store's address, and by its rank: `<digest>.<rank>`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from scarctl.util.document import Document

GENERATORS = ("torch", "cuda", "numpy", "python")
"""The global random generators."""
_LINES, _AGAIN = "lines", "again"


@dataclass(frozen=True, slots=True)
class Attached:
    """A session that the program has opened."""

    name: str
    store: str
    """The address that it would have used, for display."""
    digest: str
    """Digest of that address."""
    root: str | None
    """Folder of that store; None for a remote one."""
    ranks: int
    """Number of ranks that share the store."""


@dataclass(frozen=True, slots=True)
class Line:
    """What one step began with, and its result. Values are digests, but for the rates."""

    step: int
    before: Mapping[str, str] | None
    """Parameters, slots, buffers and each random generator at the first forward; None if no module was called."""
    inputs: Sequence[Mapping[str, str]]
    """Arguments of each call of a module from outside of modules since the step before, by "argument of module"."""
    rates: Mapping[str, str]
    """Learning rates and other hyperparameters, by name."""
    after: Mapping[str, str]
    """As `before`, at the step's end."""


@dataclass(frozen=True, slots=True)
class Difference(Document):
    """A tensor, or another part of the state, that differs from the undisturbed run's."""

    name: str
    what: str
    """How much differs, for display."""
    tensor: bool = True
    """Whether it is a tensor, and not a part of the extras."""


@dataclass(frozen=True, slots=True)
class Final:
    """The state at the end, compared with that of the first run."""

    step: int
    tensors: int = 0
    differences: tuple[Difference, ...] = ()
    early: bool = False
    """The program has closed the session before the last step of the rehearsal."""
    unsaved: str = ""
    """The session's warning about attributes that nobody saves."""


@dataclass(frozen=True, slots=True)
class Records:
    """All that the sessions of one run have reported."""

    attached: Mapping[str, Attached] = field(default_factory=dict)
    lines: Mapping[str, tuple[Line, ...]] = field(default_factory=dict)
    """Steps in the order in which they were made, before the interruption if there was one."""
    again: Mapping[str, tuple[Line, ...]] = field(default_factory=dict)
    """Steps after the restart."""
    finals: Mapping[str, Final] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """The newest step of any session; 0 if none has ended one."""
        found = (line.step for lines in (*self.lines.values(), *self.again.values()) for line in lines[-1:])
        return max(found, default=0)

    @property
    def starts(self) -> frozenset[int]:
        """The steps after which the sessions have continued after the restart."""
        return frozenset(lines[0].step - 1 for lines in self.again.values() if lines)

    @property
    def resumed(self) -> int:
        """The step after which the session has continued that went back farthest."""
        return min(self.starts, default=0)

    @property
    def complete(self) -> bool:
        """Whether every session has reached the end."""
        names = set(self.attached)
        for one in self.attached.values():
            if one.ranks > 1:
                names |= {f"{one.digest}.{rank}" for rank in range(one.ranks)}
        return bool(names) and names <= self.finals.keys()


def write(folder: Path, name: str, record: Attached | Final) -> None:
    """Write a record, all at once."""
    path = folder / f"{name}.{type(record).__name__.lower()}.json"
    new = path.with_suffix(".new")
    new.write_text(json.dumps(asdict(record)))
    os.replace(new, path)


def append(folder: Path, name: str, line: Line, *, again: bool) -> None:
    """Add the record of a step. again: it comes after the restart."""
    with open(folder / f"{name}.{_AGAIN if again else _LINES}", "a") as file:
        file.write(json.dumps(asdict(line)) + "\n")


def read(folder: Path) -> Records:
    """Return the records of a run. A line that a killed process has not finished is left out."""
    attached, finals = {}, {}
    for path in sorted(folder.glob("*.attached.json")):
        one = Attached(**json.loads(path.read_text()))
        attached[one.name] = one
    for path in folder.glob("*.final.json"):
        found = json.loads(path.read_text())
        found["differences"] = tuple(Difference(**one) for one in found["differences"])
        finals[path.name.removesuffix(".final.json")] = Final(**found)
    return Records(attached, _lines(folder, _LINES), _lines(folder, _AGAIN), finals)


def _lines(folder: Path, ending: str) -> dict[str, tuple[Line, ...]]:
    found = {}
    for path in folder.glob(f"*.{ending}"):
        whole = path.read_text().rpartition("\n")[0]
        found[path.stem] = tuple(Line(**json.loads(text)) for text in whole.splitlines())
    return found
