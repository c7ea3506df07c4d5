"""Report an evacuation: what is safe, what would be lost, and the predicted cost of losing it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace

import numpy as np

from scarctl.errors import Corruption
from scarctl.state.caveats import Caveat, read_caveats
from scarctl.state.common import all_there, in_common, read_digests, reasons
from scarctl.state.extras import Notes
from scarctl.state.label import Label, Labelled
from scarctl.theory.history import History
from scarctl.theory.rework import Outlook, Rework, rework_of_loss
from scarctl.util.document import INLINE, Document

NOWHERE = "neither the store nor another host has the whole state of this step, as one commit saved it"
_ALONE = (
    "other ranks have copies of the same tensors, and whether these were equal is not known here, so that it may not "
    "be consistent"
)


@dataclass(frozen=True, slots=True)
class Evacuated(Document, Labelled):
    """The result of evacuating one process's state: what is safe, and what a loss of the host would cost."""

    step: int
    """The newest step with copies, in this host's memory or in the store."""
    total_partitions: int
    total_bytes: int
    written_bytes: int
    """Bytes that were committed in this evacuation."""
    commits: int
    lost_partitions: int
    """Partitions whose newest copy only this host's memory has: neither the store, exactly, nor another host."""
    lost_bytes: int
    squared: float | None
    """Sum of squared distances of these parameters from the store's copies (l2), an upper bound; None if unknown."""
    sealed: bool
    """Whether the store has the whole state of `step`, as one commit saved it."""
    ages: tuple[int, ...] = ()
    """Distinct ages, in iterations, of the store's copies of lost parameters, and the count of each in `counts`."""
    counts: tuple[int, ...] = ()
    parameters: int = 0
    """Partitions of parameters in the whole state."""
    points: tuple[tuple[float, ...], ...] = ()
    """The run's movements, from which rework is predicted: see `scarctl.theory.history`."""
    peer_partitions: int = 0
    """Partitions whose newest copy is in the memory of other hosts, and not in the store."""
    peer_bytes: int = 0
    peers: tuple[str, ...] = ()
    """Names of hosts that have copies of this memory."""
    peer_sealed: bool = False
    """Whether one of these hosts has the whole state of `step`, as one commit saved it."""
    flushed: bool = True
    """False if a live process's newest step could not be flushed: more would be lost than is counted here."""
    extras_lost: bool = False
    """Whether the newest extras (step counters, random states, the user's) are only in this host's memory."""
    error: str | None = None
    """Why saving stopped before the deadline, or the last failure."""
    commit_name: str = ""
    """Name of the commit of the whole state in this host's memory (`Record.whole`); "" if copies are of several."""
    label: Label = field(default_factory=Label, metadata=INLINE)
    """The label of what outlives this host, in the store or on another host."""
    caveats: tuple[Caveat, ...] = ()
    """The caveats that were saved with that commit, or one that they cannot be read."""
    common: Mapping[str, str] = field(default_factory=dict)
    """The digests that were saved with it: see `scarctl.state.common`."""

    @property
    def safe(self) -> bool:
        """Whether losing the host would lose nothing."""
        return self.flushed and not self.lost_partitions and not self.extras_lost

    @property
    def rework(self) -> Rework:
        """Predicted rework, in iterations, after the loss of the host."""
        return rework_of_all([self])

    @classmethod
    def from_json(cls, obj: object) -> Evacuated:
        """Read the values of `to_json`. Raises Corruption for anything else."""
        names = [one.name for one in fields(cls)]
        needed = [one.name for one in fields(cls) if one.default is one.default_factory is MISSING]
        needed += ["oldest_step", "newest_step", "reasons", "position"]
        if not isinstance(obj, Mapping) or not all(name in obj for name in needed):
            raise Corruption("another process has sent an evacuation's report without its fields")
        caveats, common = read_caveats(obj.get("caveats")), read_digests(obj.get("common"))
        lists = ("ages", "counts", "points", "peers")
        values = {name: obj[name] for name in names if name in obj}
        values |= {name: obj.get(name, ()) for name in lists}
        if not all(isinstance(values[name], list | tuple) for name in lists):
            raise Corruption("another process has sent an evacuation's report without its numbers")
        values |= {name: tuple(values[name]) for name in lists}
        points, label = tuple(map(tuple, values["points"])), Label.from_json(obj)
        if values.get("commit_name") and (values["sealed"] or values.get("peer_sealed")):
            label = replace(label, mixed=(), caveats=label.mixed)
        return cls(**values | {"points": points, "caveats": caveats, "common": common, "label": label})


def why_mixed_ranks(found: Sequence[Evacuated | Notes]) -> tuple[str, ...]:
    """Return why whole states of one commit are not consistent, one sentence each. found: what ranks saved with it."""
    known = reasons(in_common(found))
    return known if all_there(one.common for one in found) else (*known, _ALONE)


def rework_of_all(parts: list[Evacuated]) -> Rework:
    """Predict the rework after the loss of the host, from the reports of all processes that hold the state."""
    if not any(part.lost_partitions for part in parts):
        return Rework(0.0, 0.0, 0.0, "distances")
    step = max(part.step for part in parts)
    histories = [
        History.from_array(np.array(part.points, dtype=np.float64).reshape(-1, 3)).until(step)
        for part in parts
        if part.parameters
    ]
    known = [part.squared for part in parts]
    norm = None if None in known else math.sqrt(math.fsum(one for one in known if one is not None))
    ages = [age for part in parts for age in part.ages]
    counts = [count for part in parts for count in part.counts]
    share = sum(counts) / max(1, sum(part.parameters for part in parts))
    return rework_of_loss(Outlook.of(step, histories), norm, ages, share, counts=counts)
