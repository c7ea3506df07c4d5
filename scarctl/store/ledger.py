"""Count a writer's bytes, and measure the lives of its copies, for its collector."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from scarctl.store.compact import Lives
from scarctl.store.record import Record
from scarctl.store.segment import Tail
from scarctl.store.shard_state import ShardState


@dataclass
class ShardFiles:
    """The files of one shard, counted since a collector first requested the count."""

    total: int
    """Bytes of all files."""
    handed: int = 0
    """Bytes of commits."""
    lives: Lives = field(default_factory=Lives)


class Ledger:
    """The counts of one writer. Several threads may commit, each to a different shard."""

    def __init__(self) -> None:
        self.handed_bytes = 0
        """Bytes of partitions in all commits."""
        self.written_bytes = 0
        """Bytes of all files written since the store was opened: segments, records and indexes."""
        self.shards: dict[int, ShardFiles] = {}
        """Files of the shards that a collector requested."""
        self._counting = threading.Lock()

    def handed(self, shard: int, nbytes: int) -> None:
        """Count partitions that were committed to a shard."""
        with self._counting:
            self.handed_bytes += nbytes
        if shard in self.shards:
            self.shards[shard].handed += nbytes

    def wrote(self, shard: int, nbytes: int) -> None:
        """Count a file that was created in a shard."""
        with self._counting:
            self.written_bytes += nbytes
        if shard in self.shards:
            self.shards[shard].total += nbytes

    def committing(self, state: ShardState, record: Record, tail: Tail | None) -> None:
        """Note the copies of a durable record. `state`: the state before it."""
        if record.kind == "commit" and tail is not None and record.shard in self.shards:
            self.shards[record.shard].lives.saved(state, state.find(tail.ids), record.step)
