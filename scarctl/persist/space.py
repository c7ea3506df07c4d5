"""Type the bytes that saving and collecting have written: see `scarctl.persist.persister.Persister.space`."""

from __future__ import annotations

from typing import TypedDict


class SpaceFields(TypedDict):
    """Bytes that a run's saving has written."""

    handed_bytes: int
    """Bytes of partitions that were to be saved."""
    written_bytes: int
    moved_bytes: int
    """Bytes that collecting has copied."""
    collected_bytes: int
    """Bytes that collecting has deleted."""
    write_amplification: float | None
    """`written_bytes` / `handed_bytes`."""
