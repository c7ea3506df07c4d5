"""Give a log's content a number: logs with the same state and different histories have different numbers.

Every record carries the `line` of its log: the `write_id` of the record that last changed what the log says, a commit
or a roll-back. Epochs and compaction pass it on. So it is known from the newest record alone, also when older ones are
collected; and a copy of a store has lines of its own from its first commit on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Companion(Protocol):
    """Notes the line of every log, as an arena does: by it an arena is known to belong to a store.

    Several threads may publish records at once, each of another shard.
    """

    def begin_lines(self, lines: Mapping[int, int]) -> None:
        """Note the lines of now, by shard. Raises Unavailable if they cannot be noted."""

    def expect(self, shard: int, line: int) -> None:
        """A record of `shard` is about to be created, after which its log has `line`."""

    def note(self, shard: int, line: int) -> None:
        """The record is there, and durable."""


def number_of(line: str) -> int:
    """Return a record's line as a number, 1 .. 2^60; 0 where an earlier version of scarctl wrote none."""
    return int(line[:15], 16) + 1 if line else 0
