"""What a store holds, as one number: two logs that say the same state after different histories have different ones.

Every record carries the `line` of its log: the `write_id` of the record that last changed what the log says, a commit
or a roll-back. Epochs and compaction pass it on. So it is known from the newest record alone, also when older ones are
collected; and a copy of a store has a line of its own from its first commit on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Protocol

_SIZE = 1 << 62


class Companion(Protocol):
    """What is kept beside a store, an arena: it notes the store's line, by which it is known to belong to it."""

    def expect(self, line: int) -> None:
        """A record is about to be created, after which `line` is the store's."""

    def note(self, line: int) -> None:
        """The record is there, and durable."""


def line_of(lines: Mapping[int, str]) -> int:
    """The line of a store from those of its logs, by shard: 1 .. 2^62. The order of the shards does not matter."""
    return 1 + sum(_term(shard, line) for shard, line in lines.items()) % _SIZE


@lru_cache(maxsize=1 << 16)
def _term(shard: int, line: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{shard}:{line}".encode()).digest()[:8], "little")
