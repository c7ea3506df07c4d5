"""Count a writer's bytes, and measure the lives of its copies, for its collector."""

from __future__ import annotations

from dataclasses import dataclass, field

from scarctl.store.compact import Lives


@dataclass
class Ledger:
    """The counts of one writer since the store was opened."""

    handed_bytes: int = 0
    """Bytes of partitions in all commits."""
    written_bytes: int = 0
    """Bytes of all files written: segments and records."""
    lives: Lives = field(default_factory=Lives)
