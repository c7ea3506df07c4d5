"""Identify a log's history by a number, its line: logs with equal states but different histories have different lines.

Every record has the `line` of its log: the `write_id` of the last record that changed the state, a commit or a
rollback. Epochs and compaction pass it on. So the newest record alone has it, even if older ones are collected. A copy
of a store has other lines from its first commit on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Companion(Protocol):
    """Notes the line of every log. An arena does so, to prove that it belongs to the store.

    Several threads may publish records at once, each of a different shard.
    """

    def begin_lines(self, lines: Mapping[int, int]) -> None:
        """Note the current lines, by shard. Raises Unavailable if they cannot be noted."""

    def expect(self, shard: int, line: int) -> None:
        """Note that a record of `shard` is about to be created, with which its log has `line`."""

    def note(self, shard: int, line: int) -> None:
        """Note that the record is durable."""


def number_of(line: str) -> int:
    """Return a record's line as a number, 1 .. 2^60; 0 if it has none, from an earlier version of scarctl."""
    return int(line[:15], 16) + 1 if line else 0
