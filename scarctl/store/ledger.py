"""Count a writer's bytes, and measure the lives of its copies, for its collector."""

from __future__ import annotations

from dataclasses import dataclass, field

from scarctl.store.compact import Lives
from scarctl.store.record import Record
from scarctl.store.shard_state import ShardState
from scarctl.store.table import Tail


@dataclass
class LaneFiles:
    """The files of one lane, counted since a collector first requested the count."""

    total: int
    """Bytes of all files."""
    handed: int = 0
    """Bytes of commits."""
    lives: Lives = field(default_factory=Lives)


class Ledger:
    """The counts of one writer."""

    def __init__(self) -> None:
        self.handed_bytes = 0
        """Bytes of partitions in all commits."""
        self.written_bytes = 0
        """Bytes of all files written since the store was opened: segments and records."""
        self.files: LaneFiles | None = None
        """Files of the lane, once a collector has requested the count."""

    def handed(self, nbytes: int) -> None:
        """Count partitions that were committed."""
        self.handed_bytes += nbytes
        if self.files is not None:
            self.files.handed += nbytes

    def wrote(self, nbytes: int) -> None:
        """Count a file that was created."""
        self.written_bytes += nbytes
        if self.files is not None:
            self.files.total += nbytes

    def committing(self, state: ShardState, record: Record, tail: Tail) -> None:
        """Note the copies of a durable record. `state`: the state before it."""
        if record.changes and self.files is not None and len(tail.ids):
            self.files.lives.saved(state, state.find(tail.ids), record.step)
