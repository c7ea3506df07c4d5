"""Describe the store's files in the transition system, and the conditions that hold at every moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tests.adversarial.search import Broken

Segment = tuple[int, str, int]
"""Epoch, writer, number."""
Uid = tuple[str, int]


@dataclass(frozen=True, eq=False)
class Rec:
    uid: Uid
    kind: str
    epoch: int
    table: tuple[Segment | None, Segment | None]
    boundary: int
    sealed: tuple[int, ...]
    """The sealed states that may still exist, according to the log."""
    seal: int
    """The newest sealed state, according to the real history; -1: there is no sealed state."""
    back: int
    """Where reading continues: the previous number, or the base."""
    past: tuple[Uid, ...]
    """The records on which this one builds."""

    def __post_init__(self) -> None:
        # Worlds are compared by their hashes, many times.
        object.__setattr__(self, "_key", hash(tuple(vars(self).values())))

    def __hash__(self) -> int:
        return vars(self)["_key"]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rec) and vars(self) == vars(other)

    def __lt__(self, other: Rec) -> bool:
        return self.uid < other.uid


class Files(NamedTuple):
    log: tuple[tuple[int, Rec], ...] = ()
    index: frozenset[int] = frozenset()
    segments: frozenset[Segment] = frozenset()
    snapshots: frozenset[tuple[str, int]] = frozenset()
    flying: frozenset[tuple[int, Rec]] = frozenset()
    """Requests to create a record whose sender has given up waiting: each arrives later, or never."""
    acknowledged: frozenset[tuple[int, Uid]] = frozenset()
    promised: frozenset[tuple[str, int]] = frozenset()


def check(files: Files) -> None:
    """Raise Broken unless all conditions hold."""
    log = dict(files.log)
    if not log:
        return
    newest = log[max(log)]
    past = {*newest.past, newest.uid}
    for seq, uid in files.acknowledged:
        if uid not in past:
            raise Broken(f"commit {uid} was acknowledged, and record {seq} is not in the log")
    if len({seq for seq, _ in files.acknowledged}) < len(files.acknowledged):
        raise Broken("two commits of one number")
    _readable(files, log, max(log), "the newest state")
    if newest.seal >= 0:
        _readable(files, log, newest.seal, "the newest sealed state")
    for _, seq in files.promised:
        _readable(files, log, seq, "a snapshot's state")


def _readable(files: Files, log: dict[int, Rec], seq: int, what: str) -> None:
    if seq not in log or not has_way(log, files.index, seq):
        raise Broken(f"{what}, {seq}: its record or the way to it is gone")
    missing = {s for s in log[seq].table if s is not None} - files.segments
    if missing:
        raise Broken(f"{what}, {seq}: segments {missing} are gone")


def has_way(log: dict[int, Rec], index: frozenset[int], seq: int) -> bool:
    """Return whether the state after a record can be read."""
    while seq in log:
        if seq in index or log[seq].back < 0:
            return True
        seq = log[seq].back
    return False
